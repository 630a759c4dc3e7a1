"""Progress on stderr, for everything that takes over a second; silent when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.cli.output import err, say

Steps = Callable[[str, int | None, int | None], None]  # what is being done, how much of it, how much in all


@contextmanager
def steps(*, aloud: bool = False, tokens: bool = False) -> Iterator[Steps]:
    """Show one line for each step that is reported: a spinner, or a bar where it is known how far it is.

    Parameters
    ----------
    aloud : bool
        Where stderr is no terminal, name each step in a line of its own: for what takes minutes.
    tokens : bool
        What is counted is tokens; else it is bytes, and their speed is shown.

    Yields
    ------
    Steps
        To be called as often as wanted; a new description begins a new line.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    figures: tuple[ProgressColumn, ...] = (
        (MofNCompleteColumn(),) if tokens else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    )
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(24),
        *figures,
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    ) as bar:
        tasks: dict[str, int] = {}

        def report(what: str, done: int | None, total: int | None) -> None:
            if what not in tasks:
                if aloud and not err().is_terminal:
                    say(f"{what} ...")
                tasks[what] = bar.add_task(what, total=total)
                for earlier in list(tasks)[:-1]:
                    bar.update(tasks[earlier], visible=False)  # type: ignore[arg-type]
            if done is not None:
                bar.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield report


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show that `what` is going on."""
    with err().status(what) if err().is_terminal else _silence():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    yield
