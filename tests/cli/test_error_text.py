"""What `strata explain` reads: texts, logs of every encoding and length, pipes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from strata.cli import error_text
from strata.cli.error_text import ErrorText, read_error_text
from strata.errors import UsageError

ERROR = "ERROR native head upload: out of memory"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_log_in_any_encoding_that_a_shell_writes(tmp_path: Path, encoding: str, end: str) -> None:
    (tmp_path / "x.log").write_bytes(f"löading{end}{ERROR}{end}".encode(encoding))
    assert read_error_text(str(tmp_path / "x.log")) == ErrorText(f"löading{end}{ERROR}{end}")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_of_a_long_log_the_beginning_and_the_end_are_read_with_their_line_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(error_text, "MOST", 4096)
    monkeypatch.setattr(error_text, "_BLOCK", 1000)
    lines = [f"line {n} ü" for n in range(1, 20_001)]
    (tmp_path / "x.log").write_bytes("\n".join(lines).encode(encoding))
    found = read_error_text(str(tmp_path / "x.log"))
    whole = dict(enumerate(found.text.split("\n"), 1))
    assert found.skipped > 15_000
    for number in (1, 50, max(whole) - 50, max(whole)):
        assert whole[number] == lines[found.line_number(number) - 1]
    assert len(found.text) < 5000


def test_what_names_no_file_is_a_text(tmp_path: Path) -> None:
    for given in (ERROR, "error in a/b", "x" * 5000, "a.b c.d", "nul\0byte.txt x", "/dev/zero", "what? C:\\x"):
        assert read_error_text(given) == ErrorText(given)


def test_a_folder_and_a_missing_log_are_refused(tmp_path: Path) -> None:
    for given, why in ((str(tmp_path) + os.sep, "folder"), (str(tmp_path / "gone.log"), "no such file")):
        with pytest.raises(UsageError, match=why):
            read_error_text(given)


def test_a_pipe_is_read_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_text, "MOST", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"0123456789abc")))
    assert read_error_text("-") == ErrorText("0123456789")
