"""What the boundary says of an error."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import typer

from strata.cli import output
from strata.errors import AllocationFailed, DeviceFailed, KernelError, PlanInfeasible, PlanViolation, UsageError


@pytest.mark.parametrize(
    ("error", "offered"),
    [
        (AllocationFailed("take memory", "it was refused", "close programs", line="head", nbytes=5), True),
        (KernelError("launch", "it failed", "try again"), True),
        (PlanViolation("take memory", "no such line", "report it"), True),
        (ZeroDivisionError("a bug"), True),
        (UsageError("open x", "it does not exist", "give another"), False),
        (DeviceFailed("use GPU x", "unspecified launch failure", ""), True),
        (PlanInfeasible("plan x", "too large", "--max-context 512"), False),
    ],
)
def test_a_report_is_offered_where_it_would_help(
    error: Exception, offered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    output.err.cache_clear()  # a console of the captured stderr
    with pytest.raises(typer.Exit):
        output.boundary(command)()
    said = capsys.readouterr().err
    output.err.cache_clear()
    assert ("strata report writes" in said) is offered
    assert "Traceback" not in said


def test_what_is_kept_of_a_bug_for_an_issue_names_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def command() -> None:
        raise ZeroDivisionError("at /home/some-body/m.gguf with hf_AbCdEfGhIjKlMnOp1")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output.err.cache_clear()
    with pytest.raises(typer.Exit):
        output.boundary(command)()
    output.err.cache_clear()
    assert "attach" in capsys.readouterr().err
    (kept,) = tmp_path.glob("strata-bug-*.txt")
    text = kept.read_text(encoding="utf-8")
    assert "ZeroDivisionError: at /home/[user-1]/m.gguf with [token]" in text
    assert "some-body" not in text
    assert "in command" in text


def test_a_bug_is_said_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    def command() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    output.err.cache_clear()
    with pytest.raises(typer.Exit):
        output.boundary(command)()
    said = capsys.readouterr().err
    output.err.cache_clear()
    assert "ZeroDivisionError: a bug" in said
    assert "open an issue with the lines above" in said
