"""The run log survives crashes, keeps ten files and never stands in the way of a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.errors import ModelFileError
from strata.runtime.runlog import KEEP, RunLog, fingerprint, log_folder, run_logs

from .plans import plan_of, reservation

CHILD = """
import sys
from pathlib import Path
from strata.runtime.runlog import RunLog
from tests.runtime.plans import plan_of, reservation
log = RunLog(Path(sys.argv[1]), warn=print)
log.event("plan", plan=plan_of(reservation("head", 4096)))
print("written", flush=True)
sys.stdin.read()
"""


def never(sentence: str) -> None:
    pytest.fail(f"a warning: {sentence}")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_json_lines_with_both_clocks(tmp_path: Path) -> None:
    with RunLog(tmp_path, warn=never) as log:
        log.event("allocation", line="head", bytes=4096, code="ok")
        log.event("load", phase="weights")
        assert log.path is not None
        first, second = lines_of(log.path)  # read while the log is open
    assert first["event"] == "allocation"
    assert (first["line"], first["bytes"], first["code"]) == ("head", 4096, "ok")
    assert str(first["time"]).endswith("+00:00")
    assert first["monotonic_s"] <= second["monotonic_s"]  # type: ignore[operator]


def test_the_newest_ten_are_kept(tmp_path: Path) -> None:
    paths = []
    for _ in range(KEEP + 3):
        with RunLog(tmp_path, warn=never) as log:
            paths.append(log.path)
    assert run_logs(tmp_path) == list(reversed(paths[-KEEP:]))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for _ in range(KEEP + 2):
        RunLog(tmp_path, warn=never).close()
    assert (tmp_path / "notes.txt").exists()


def test_two_runs_at_once_have_a_file_each(tmp_path: Path) -> None:
    with RunLog(tmp_path, warn=never) as one, RunLog(tmp_path, warn=never) as two:
        one.event("start")
        two.event("start")
        assert one.path != two.path
        assert len(run_logs(tmp_path)) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_killed_run_leaves_its_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        os.kill(child.pid, signal.SIGKILL)
    (path,) = run_logs(tmp_path)
    (line,) = lines_of(path)
    assert line["plan"]["reservations"][0]["id"] == "head"  # type: ignore[index]


def test_an_unwritable_folder_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    with RunLog(tmp_path / "file" / "logs", warn=said.append) as log:
        log.event("start")
        log.event("end")
        assert log.path is None
    assert len(said) == 1
    assert "STRATA_LOG_DIR" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(tmp_path, warn=said.append)
    log._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - the log closes it
    log.event("start")
    log.event("end")
    assert len(said) == 1


def test_errors_are_logged_but_foreign_messages_are_not(tmp_path: Path) -> None:
    def last_line_after(error: Exception) -> dict[str, object]:
        log = RunLog(tmp_path, warn=never)
        with contextlib.suppress(type(error)), log:
            raise error
        assert log.path is not None
        return lines_of(log.path)[-1]

    ours = last_line_after(ModelFileError("open x", "it is cut", "Fetch it again"))
    assert (ours["type"], ours["message"]) == ("ModelFileError", "open x: it is cut. Fetch it again")
    foreign = last_line_after(ValueError("my secret prompt"))
    assert (foreign["type"], foreign["message"]) == ("ValueError", "")


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_LOG_DIR", str(tmp_path))
    assert log_folder() == tmp_path
    monkeypatch.delenv("STRATA_LOG_DIR")
    assert "strata" in log_folder().parts


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no users without a home")
def test_a_user_without_home_or_account_still_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `docker run --user 12345`."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME", "STRATA_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert log_folder() == Path("/tmp") / f"strata-log-{os.getuid()}"


def test_a_fingerprint_tells_structs_apart() -> None:
    one, two = plan_of(reservation("head", 1)), plan_of(reservation("head", 2))
    assert fingerprint(one) == fingerprint(plan_of(reservation("head", 1))) != fingerprint(two)
