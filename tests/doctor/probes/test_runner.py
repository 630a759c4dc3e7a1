"""Real child processes that hang, crash, shout and lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.doctor.facts import Probe, ProbeStatus
from strata.doctor.probes import runner
from strata.doctor.probes.request import ProbeRequest
from strata.doctor.probes.runner import Job, probe_job, run_jobs

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")

WRITE = "import json, sys\ndef write(**record):\n    open(sys.argv[1], 'a').write(json.dumps(record) + '\\n')\n"


def run_code(code: str, time_limit_s: float = 10.0) -> Probe:
    job = Job("group", time_limit_s, (sys.executable, "-c", WRITE + code))
    return run_jobs([job])["group"]


def test_result_is_taken_from_the_result_file() -> None:
    probe = run_code("write(value={'a': 1}, status='ok')")
    assert (probe.status, probe.value, probe.error) == (ProbeStatus.OK, {"a": 1}, None)
    assert probe.seconds is not None
    assert probe.seconds > 0


def test_garbage_on_stdout_around_the_result_is_harmless() -> None:
    probe = run_code(
        "print('{\"value\": 0}', flush=True)\nsys.stdout.buffer.write(bytes(range(256)))\n"
        "write(value=1, status='ok')\nprint('bye')"
    )
    assert (probe.status, probe.value) == (ProbeStatus.OK, 1)


def test_flood_on_stdout_and_stderr_neither_blocks_nor_is_kept() -> None:
    probe = run_code(
        "for _ in range(300):\n    sys.stdout.write('x' * 100_000)\n    sys.stderr.write('y' * 100_000)\n"
        "sys.stderr.write('the end')\nsys.stderr.flush()\nsys.exit(1)"
    )
    assert probe.status is ProbeStatus.CRASHED
    assert probe.error is not None
    assert probe.error.stderr is not None
    assert len(probe.error.stderr) <= runner.STDERR_BYTES
    assert probe.error.stderr.endswith("the end")


def test_sleeping_child_is_killed_and_what_it_knew_is_kept() -> None:
    started = time.monotonic()
    probe = run_code(
        "import time\nwrite(value={'half': True})\nprint('waiting', file=sys.stderr, flush=True)\ntime.sleep(60)", 1.0
    )
    assert time.monotonic() - started < 10
    assert probe.status is ProbeStatus.TIMED_OUT
    assert probe.value == {"half": True}
    assert probe.error is not None
    assert probe.error.message == "no answer within 1 s"
    assert probe.error.stderr == "waiting"


def test_child_in_uninterruptible_wait_is_left_behind_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def kill_in_vain(process: subprocess.Popen) -> None:  # what SIGKILL does to a process in state D
        pids.append(process.pid)

    monkeypatch.setattr(runner, "_kill", kill_in_vain)
    monkeypatch.setattr(runner, "KILL_GRACE_S", 0.2)
    started = time.monotonic()
    probe = run_code("import time\ntime.sleep(30)", 0.5)
    assert time.monotonic() - started < 10
    assert probe.status is ProbeStatus.TIMED_OUT
    assert probe.error is not None
    assert f"process {pids[0]} cannot be killed" in probe.error.message
    os.kill(pids[0], signal.SIGTERM)


@POSIX
@pytest.mark.parametrize(
    "name", ["SIGSEGV", "SIGABRT", "SIGKILL", "SIGBUS", "SIGFPE", "SIGILL", "SIGTERM", "SIGHUP", "SIGTRAP"]
)
def test_crash_by_signal_is_named(name: str) -> None:
    number = getattr(signal, name)
    probe = run_code(
        f"import os\nprint('last words', file=sys.stderr, flush=True)\nwrite(value=7)\nos.kill(os.getpid(), {number})"
    )
    assert probe.status is ProbeStatus.CRASHED
    assert probe.value == 7
    assert probe.error is not None
    assert (probe.error.code, probe.error.name) == (number, name)
    assert probe.error.stderr is not None
    assert "last words" in probe.error.stderr


@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("pass", 0)])
def test_end_without_a_result_is_a_crash(code: str, status: int) -> None:
    probe = run_code(code)
    assert (probe.status, probe.value) == (ProbeStatus.CRASHED, None)
    assert probe.error is not None
    assert (probe.error.code, probe.error.message) == (status, f"ended without a result, exit status {status}")


def test_result_stands_whatever_happens_in_teardown() -> None:
    assert run_code("import os\nwrite(value=1, status='ok')\nos.abort()").status is ProbeStatus.OK
    assert run_code("import time\nwrite(value=1, status='ok')\ntime.sleep(60)", 0.7).status is ProbeStatus.OK


def test_cut_off_and_foreign_lines_in_the_result_file_are_passed_over() -> None:
    probe = run_code('write(value=1)\nopen(sys.argv[1], \'a\').write(\'no json\\n{"value": 2, "status": "o\')')
    assert (probe.status, probe.value) == (ProbeStatus.CRASHED, 1)


def test_failure_carries_the_last_words() -> None:
    probe = run_code("print('why', file=sys.stderr)\nwrite(status='failed', error={'message': 'no', 'code': 35})")
    assert probe.status is ProbeStatus.FAILED
    assert probe.error is not None
    assert (probe.error.code, probe.error.stderr) == (35, "why")


def test_one_bad_child_does_not_hide_the_others() -> None:
    def job(group: str, code: str) -> Job:
        return Job(group, 1.5 if group == "hangs" else 10.0, (sys.executable, "-c", WRITE + code))

    ended: list[str] = []
    probes = run_jobs(
        [
            job("hangs", "import time\ntime.sleep(60)"),
            job("works", "write(value=1, status='ok')"),
            Job("cannot start", 1.0, ("/no/such/program",)),
            job("crashes", "import os\nos.abort()"),
        ],
        on_done=lambda group, probe: ended.append(group),
    )
    assert {group: probe.status.value for group, probe in probes.items()} == {
        "hangs": "timed_out",
        "works": "ok",
        "cannot start": "failed",
        "crashes": "crashed",
    }
    assert sorted(ended) == sorted(probes)
    assert ended[-1] == "hangs"


def test_children_run_side_by_side() -> None:
    code = (
        "import os, time\nfrom pathlib import Path\nhere = Path(sys.argv[1]).parent\n(here / NAME).touch()\n"
        "while not (here / OTHER).exists():\n    time.sleep(0.01)\nwrite(value=1, status='ok')"
    )
    jobs = [
        Job(name, 20.0, (sys.executable, "-c", f"NAME, OTHER = '{name}1', '{other}1'\n" + WRITE + code))
        for name, other in (("a", "b"), ("b", "a"))
    ]
    assert all(probe.status is ProbeStatus.OK for probe in run_jobs(jobs).values())


def test_request_reaches_the_child_and_closing_stdin_is_not_an_error() -> None:
    job = Job("group", 10.0, (sys.executable, "-c", WRITE + "write(value=sys.stdin.read(), status='ok')"), b"hello")
    assert run_jobs([job])["group"].value == "hello"
    deaf = Job("deaf", 10.0, (sys.executable, "-c", WRITE + "sys.stdin.close()\nwrite(status='ok')"), b"x" * 10_000_000)
    assert run_jobs([deaf])["deaf"].status is ProbeStatus.OK


def test_no_child_outlives_an_interruption() -> None:
    pids: list[int] = []

    def interrupt(group: str, probe: Probe) -> None:
        pids.append(probe.value)
        raise KeyboardInterrupt

    jobs = [
        Job("quick", 10.0, (sys.executable, "-c", WRITE + "import os\nwrite(value=os.getppid(), status='ok')")),
        Job("slow", 60.0, (sys.executable, "-c", "import time\ntime.sleep(60)")),
    ]
    processes: list[subprocess.Popen] = []
    kept = subprocess.Popen.__init__

    def remember(self: subprocess.Popen, *args: object, **options: object) -> None:
        processes.append(self)
        kept(self, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", remember)
        with pytest.raises(KeyboardInterrupt):
            run_jobs(jobs, on_done=interrupt)
    assert pids == [os.getpid()]
    assert all(process.wait(timeout=10) is not None for process in processes)


def test_probe_children_ignore_modules_where_the_person_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "platform.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    probe = run_jobs([probe_job("adapters", ProbeRequest(), 20.0)])["adapters"]
    assert probe.status is ProbeStatus.OK


@POSIX
def test_stopped_child_is_killed() -> None:
    """`kill -STOP` freezes a process; only SIGKILL still ends it."""
    probe = run_code("import os, signal\nwrite(value=1)\nos.kill(os.getpid(), signal.SIGSTOP)", 1.0)
    assert (probe.status, probe.value) == (ProbeStatus.TIMED_OUT, 1)


def waits_until_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if sys.platform == "linux" and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # dead, and waits for an init that reaps orphans
        time.sleep(0.02)
    return False


@POSIX
@pytest.mark.parametrize("ending", ["sys.exit(0)", "time.sleep(60)", "os.abort()"])
def test_grandchildren_end_with_their_parent_and_do_not_hold_up_its_outcome(ending: str) -> None:
    """A tool that a probe starts (ldconfig, nvidia-smi) inherits its stderr and may hang longer than the probe."""
    started = time.monotonic()
    probe = run_code(
        "import os, subprocess, time\n"
        "tool = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"write(value=tool.pid, status='ok')\n{ending}",
        2.0,
    )
    assert time.monotonic() - started < 20
    assert probe.status is ProbeStatus.OK
    assert waits_until_gone(probe.value)


@POSIX
def test_child_that_outlives_a_killed_parent_ends_by_itself(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("Linux alone can do this")
    (tmp_path / "told").touch()
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom strata.doctor.probes import child\n"
        "child._end_with_parent()\nPath(sys.argv[1]).write_text('ready')\ntime.sleep(60)"
    )
    parent_code = (
        "import subprocess, sys, time\n"
        f"kid = subprocess.Popen([sys.executable, '-c', {code!r}, sys.argv[1]], start_new_session=True)\n"
        "print(kid.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "told")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    while not (tmp_path / "told").read_text():
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    assert waits_until_gone(pid)


def test_where_nothing_can_be_written_results_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("Linux alone can do this")

    def refuse(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(runner.tempfile, "TemporaryDirectory", refuse)
    probe = run_code("write(value=1)\nwrite(value=2, status='ok')")
    assert (probe.status, probe.value) == (ProbeStatus.OK, 2)


def test_what_a_probe_knows_is_told_while_it_works() -> None:
    told: list[object] = []
    code = "import time\nfor n in range(8):\n    write(value=n)\n    time.sleep(0.1)\nwrite(value=8, status='ok')"
    job = Job("group", 20.0, (sys.executable, "-c", WRITE + code))
    assert run_jobs([job], on_state=lambda group, value: told.append(value))["group"].value == 8
    known = [value for value in told if value is not None]
    assert known
    assert known == sorted(known)  # type: ignore[type-var]


def test_endless_results_are_bounded_in_memory() -> None:
    probe = run_code(
        "import time\nwhile True:\n    open(sys.argv[1], 'a').write('x' * 1_000_000)\n    time.sleep(0.02)", 1.0
    )
    assert (probe.status, probe.value) == (ProbeStatus.TIMED_OUT, None)
