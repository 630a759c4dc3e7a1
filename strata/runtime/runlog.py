"""The run log: one file of JSON lines a run, flushed line by line, so that it outlives a crash.

It tells what was promised and what happened: versions, facts, the plan, every allocation with its code, the
phases of loading, figures of each generation, the error. It never holds a prompt or generated text.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import msgspec
import platformdirs

from strata.errors import StrataError
from strata.folders import user_folder
from strata.runtime.driver_errors import driver_fields

KEEP = 10  # files
ENVIRONMENT = "STRATA_LOG_DIR"


def log_folder() -> Path:
    """Return where run logs lie: ``$STRATA_LOG_DIR``, else the user's log folder, or what stands in for it."""
    return user_folder(ENVIRONMENT, lambda: Path(platformdirs.user_log_dir("strata", appauthor=False)), "log")


def run_logs(folder: Path) -> list[Path]:
    """Return the run logs in `folder`, newest first."""
    return sorted(folder.glob("run-*.jsonl"), key=lambda path: path.name, reverse=True)


def fingerprint(data: msgspec.Struct) -> str:
    """Return the SHA-256 of a struct's JSON form, in hex."""
    return hashlib.sha256(msgspec.json.encode(data)).hexdigest()


class RunLog:
    """A run's log. A context manager: leaving it logs the error, if there is one, and closes the file.

    Parameters
    ----------
    folder : Path
        Made when missing. The newest `KEEP` logs in it are kept, this one included.
    warn : callable
        Told once, in a sentence, when the log cannot be written. The run goes on without it.
    """

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._folder = folder
        self._file: TextIO | None = None
        self.path: Path | None = None
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = folder / f"run-{started}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8", buffering=1)  # one write a line
        except OSError as error:
            self._give_up(error)
            return
        self.path = path
        for old in run_logs(folder)[KEEP:]:
            with contextlib.suppress(OSError):  # another run removed it first, or still writes it (Windows)
                old.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # Only our own messages and a driver's are known to hold no prompt; of any other error the type has to do.
            message = str(error) if isinstance(error, StrataError) else ""
            self.event("error", type=type(error).__name__, message=message, **driver_fields(error))
        self.close()

    def event(self, kind: str, **fields: Any) -> None:
        """Write one line: the event's name, the time, seconds on the monotonic clock, and `fields`."""
        if self._file is None:
            return
        line = {"event": kind, "time": datetime.now(UTC).isoformat(), "monotonic_s": time.monotonic(), **fields}
        try:
            self._file.write(msgspec.json.encode(line).decode() + "\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Later events are dropped."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk was already said, by the write that met it
                self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        self.close()
        why = error.strerror or str(error)
        self._warn(f"The run log cannot be written to {self._folder} ({why}); set {ENVIRONMENT} to another folder.")
