"""Progress on a terminal shows what is known and nothing else; elsewhere long steps are named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from strata.cli import output, progress


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> io.StringIO:
    file = io.StringIO()
    console = Console(file=file, force_terminal=request.param, width=80, color_system=None)
    for module in (output, progress):
        monkeypatch.setattr(module, "err", lambda: console)
    return file


@pytest.mark.parametrize("screen", [True], indirect=True)
def test_a_terminal_shows_what_is_known(screen: io.StringIO) -> None:
    with progress.steps() as report:
        report("rewriting", None, None)
    assert "rewriting" in screen.getvalue()
    assert "?" not in re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.getvalue())
    assert "bytes" not in screen.getvalue()
    with progress.steps(tokens=True) as report:
        report("reading", 12, 48)
    assert "12/48" in screen.getvalue()
    with progress.steps() as report:
        report("fetching", 1 << 20, 4 << 20)
    assert "1.0/4.0 MiB" in screen.getvalue()


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_elsewhere_only_long_steps_are_named(screen: io.StringIO) -> None:
    with progress.steps() as report:
        report("loading", 1, 2)
    assert screen.getvalue() == ""
    with progress.steps(aloud=True) as report:
        report("fetching", 1, 2)
        report("fetching", 2, 2)
    assert screen.getvalue() == "fetching ...\n"
