"""The text that `strata explain` is given: an error itself, a log file, or what comes through a pipe."""

from __future__ import annotations

import codecs
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from strata.errors import UsageError

MOST = 64 << 20  # bytes of a log that are looked at; of a longer one its beginning and its end
_BLOCK = 1 << 20
_LOG_SUFFIXES = (".log", ".txt", ".json", ".jsonl", ".out", ".err")
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(frozen=True)
class ErrorText:
    """A text, and what was left out of it: `skipped` lines behind line `kept`."""

    text: str
    kept: int = 0
    skipped: int = 0

    def line_number(self, number: int) -> int:
        """Return the number in the whole log of a line of the text."""
        return number + self.skipped if number > self.kept else number


def read_error_text(given: str) -> ErrorText:
    """Return the text meant by `given`: itself, or what the file or stdin ('-') that it names holds.

    Raises
    ------
    UsageError
        It names a folder, a log that is not there, or a file that may not be read.
    """
    if given == "-":
        return ErrorText(_decoded(sys.stdin.buffer.read(MOST)))
    if not {os.sep, os.altsep} & set(given) and not Path(given).suffix:
        return ErrorText(given)
    try:
        path = Path(given)
        if not path.is_file():
            _refuse_path(path, given)
            return ErrorText(given)
        return _read_file(path)
    except (OSError, ValueError) as error:  # a path that no system can have is a text
        if isinstance(error, PermissionError):
            raise UsageError(
                f"read {given}", "the system refuses: permission denied", "Check the permissions"
            ) from None
        return ErrorText(given)


def _refuse_path(path: Path, text: str) -> None:
    """Say that a file is missing where nothing else can be meant: a folder, or one word that ends as logs do."""
    if path.is_dir():
        raise UsageError(f"read {text}", "this is a folder", "Give the path of a log file")
    if path.suffix in _LOG_SUFFIXES and not text.split()[1:]:
        raise UsageError(f"read {text}", "there is no such file", "Give the path of a log file, or an error text")


def _read_file(path: Path) -> ErrorText:
    with path.open("rb") as file:
        data = file.read(MOST + 1)
        if len(data) <= MOST:
            return ErrorText(_decoded(data))
        half = MOST // 2
        head = data[:half]
        end = file.seek(0, os.SEEK_END)
        end -= (end - half) % 2  # a sign of UTF-16 stays whole
        file.seek(half)
        lines, left = 0, end - half - half
        while left > 0 and (block := file.read(min(_BLOCK, left))):
            lines += block.count(b"\n")
            left -= len(block)
        tail = file.read(half + 1)
    text = _decoded(head) + "\n"
    return ErrorText(text + _decoded(tail, _encoding(head)), text.count("\n"), lines - 1)


def _encoding(data: bytes) -> str:
    return next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")


def _decoded(data: bytes, encoding: str | None = None) -> str:
    """Return `data` as text: UTF-8, or by its mark UTF-16, which PowerShell writes to files."""
    return data.decode(encoding or _encoding(data), "replace").removeprefix("\ufeff")
