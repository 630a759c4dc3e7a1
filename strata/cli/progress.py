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
    from rich.console import RenderableType
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Known(ProgressColumn):
        """Another column where it has something to show: not for a step that nobody knows the length of."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return "" if task.total is None else self._column.render(task)

    class Speed(TransferSpeedColumn):
        """Nothing, rather than a question mark, before there is a speed."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.finished_speed or task.speed else Text()

    counts: tuple[ProgressColumn, ...] = (
        (MofNCompleteColumn(),) if tokens else (DownloadColumn(binary_units=True), Speed())
    )
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *(Known(column) for column in (BarColumn(24), *counts)),
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
