"""Runs probes in child processes that may hang, crash or talk nonsense, and says how each one ended.

Children are spawned, never forked, and one loop watches them all: nothing here ever waits for a process that
might not end. A child that cannot be killed (uninterruptible wait in a wedged driver) is left behind and named.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import strata
from strata.doctor.facts import Probe, ProbeError, ProbeStatus
from strata.doctor.probes.request import ProbeRequest, Record

POLL_S = 0.005
STATE_S = 0.1  # between two looks at what a running child knows
KILL_GRACE_S = 1.0  # how long a killed child may take to go
STDERR_BYTES = 4096  # how much of a child's last words is kept
RESULT_BYTES = 8 << 20  # no honest result is longer
_PACKAGE_ROOT = Path(strata.__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """One child to run.

    Parameters
    ----------
    group : str
        The probe's name.
    time_limit_s : float
        When the child is killed.
    command : sequence of str
        The command line; the path of the result file is appended.
    request : bytes
        What the child finds on stdin.
    """

    group: str
    time_limit_s: float
    command: Sequence[str]
    request: bytes = b""


def probe_job(group: str, request: ProbeRequest, time_limit_s: float) -> Job:
    """Return the job that runs the probe module called `group`."""
    command = (sys.executable, "-X", "faulthandler", "-m", "strata.doctor.probes.child", group)
    return Job(group, time_limit_s, command, msgspec.json.encode(request))


def run_jobs(
    jobs: Sequence[Job],
    on_done: Callable[[str, Probe[Any]], None] = lambda group, probe: None,
    on_state: Callable[[str, Any], None] | None = None,
) -> dict[str, Probe[Any]]:
    """Run `jobs` side by side and return each one's outcome, its value still in the form that JSON has.

    Parameters
    ----------
    jobs : sequence of Job
        What to run, one per group.
    on_done : callable, optional
        Called with the group and its outcome as each ends.
    on_state : callable, optional
        Called with the group and what its probe knows by now, several times a second.
    """
    outcomes: dict[str, Probe[Any]] = {}
    with _result_files([job.group for job in jobs]) as files:
        children: list[_Child] = []
        try:
            for job in jobs:
                try:
                    children.append(_Child(job, files[job.group]))
                except OSError as failure:
                    error = ProbeError(message=f"could not start {job.command[0]}: {failure}", code=failure.errno)
                    outcomes[job.group] = Probe(status=ProbeStatus.FAILED, error=error)
                    on_done(job.group, outcomes[job.group])
            live = list(children)
            looked = time.monotonic()
            while live:
                for child in tuple(live):
                    outcome = child.check()
                    if outcome is not None:
                        live.remove(child)
                        outcomes[child.job.group] = outcome
                        on_done(child.job.group, outcome)
                if on_state is not None and time.monotonic() - looked >= STATE_S:
                    looked = time.monotonic()
                    for child in live:
                        on_state(child.job.group, child.value())
                time.sleep(POLL_S)
        finally:
            for child in children:
                child.abandon()
    return outcomes


@contextmanager
def _result_files(groups: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Give each group a path that its child can append to; in memory, on a system where no folder can be written."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="strata-probe-", ignore_cleanup_errors=True)
            )
        except OSError:
            if not hasattr(os, "memfd_create"):
                raise
            yield {group: stack.enter_context(_memory_file(group)) for group in groups}
        else:
            yield {group: Path(folder) / group for group in groups}


@contextmanager
def _memory_file(name: str) -> Iterator[Path]:
    file = os.memfd_create(name)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{file}")
    finally:
        os.close(file)


class _Child:
    """One running child."""

    def __init__(self, job: Job, result_path: Path) -> None:
        self.job = job
        self._result_path = result_path
        self._started = time.monotonic()
        self._killed_at: float | None = None
        # In the folder that holds the package, the child imports this very package and nothing from where the
        # person happens to stand.
        self._process = subprocess.Popen(
            [*job.command, str(result_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=_PACKAGE_ROOT,
            start_new_session=True,  # a group of its own, so that what it starts can be killed with it
        )
        self._stderr = b""
        self._pipes = threading.Thread(target=self._serve_pipes, daemon=True)
        try:
            self._pipes.start()
        except RuntimeError as refusal:  # no memory for a thread, or too many of them
            self.abandon()
            raise OSError(errno.EAGAIN, str(refusal)) from refusal

    def _serve_pipes(self) -> None:
        """Hand over the request and keep the last words, in a thread of its own: either pipe may block."""
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(self.job.request)
        except OSError:
            pass  # the child ended, or closed its stdin, before it had read the request: its end says why
        with self._process.stderr as stderr:
            while block := os.read(stderr.fileno(), STDERR_BYTES):
                self._stderr = (self._stderr + block)[-STDERR_BYTES:]

    def check(self) -> Probe[Any] | None:
        """Return the outcome once there is one; kill the child when its time is up."""
        now = time.monotonic()
        ended = self._process.poll() is not None
        if ended:
            _kill(self._process)  # what it may have started
        elif self._killed_at is None and now - self._started > self.job.time_limit_s:
            _kill(self._process)
            self._killed_at = now
        if not ended and (self._killed_at is None or now - self._killed_at < KILL_GRACE_S):
            return None
        return self._outcome(now - self._started)

    def value(self) -> Any:
        """Return what the probe knows by now; None when it knows nothing yet."""
        return self._last_record().value

    def _outcome(self, seconds: float) -> Probe[Any]:
        last = self._last_record()
        if last.status is not None:  # the probe had finished; how its process ended no longer matters
            status, error = last.status, last.error
            if status is ProbeStatus.FAILED and error is not None and error.stderr is None:
                error = msgspec.structs.replace(error, stderr=self._last_words())
        elif self._killed_at is not None:
            status = ProbeStatus.TIMED_OUT
            message = f"no answer within {self.job.time_limit_s:g} s"
            if self._process.poll() is None:
                message += f"; process {self._process.pid} cannot be killed (it waits inside the kernel)"
            error = ProbeError(message=message, stderr=self._last_words())
        else:
            status = ProbeStatus.CRASHED
            error = _death(self._process.returncode, self._last_words())
        return Probe(status=status, value=last.value, error=error, seconds=round(seconds, 3))

    def _last_record(self) -> Record:
        try:
            with self._result_path.open("rb") as file:
                nbytes = min(os.fstat(file.fileno()).st_size, RESULT_BYTES)
                lines = file.read(nbytes).split(b"\n")[:-1]  # what follows the last newline was cut short
        except FileNotFoundError:
            return Record()
        for line in reversed(lines):
            try:
                return msgspec.json.decode(line, type=Record)
            except (msgspec.MsgspecError, RecursionError):
                continue
        return Record()

    def _last_words(self) -> str | None:
        self._pipes.join(timeout=0.2)  # a grandchild, or a child that cannot be killed, may hold the pipe open
        return self._stderr.decode(errors="replace").strip() or None

    def abandon(self) -> None:
        """Leave no child behind that can still be killed. Never waits."""
        if self._process.poll() is None:
            _kill(self._process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a child, and whatever it started that still runs."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):  # the group is empty: all have ended
        os.killpg(process.pid, signal.SIGKILL)


def _death(returncode: int, stderr: str | None) -> ProbeError:
    if returncode < 0 and sys.platform != "win32":
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return ProbeError(message=f"killed by {name}", code=-returncode, name=name, stderr=stderr)
    shown = f"0x{returncode & 0xFFFFFFFF:08X}" if sys.platform == "win32" else str(returncode)
    return ProbeError(message=f"ended without a result, exit status {shown}", code=returncode, stderr=stderr)
