"""Progress on stderr, for everything that takes over a second; silent when stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.cli.output import err

Steps = Callable[[str, int | None, int | None], None]  # what is being done, bytes done, bytes in all


@contextmanager
def steps() -> Iterator[Steps]:
    """Show one line for each step that is reported: a spinner, or a bar with speed where bytes are known.

    Yields
    ------
    Steps
        To be called as often as wanted; a new description begins a new line.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    ) as bar:
        tasks: dict[str, int] = {}

        def report(what: str, done: int | None, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
                for earlier in list(tasks)[:-1]:
                    bar.update(tasks[earlier], visible=False)  # type: ignore[arg-type]
            if done is not None:
                bar.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield report


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Show that `what` is going on.

    Yields
    ------
    callable
        To be told what is going on now.
    """
    if not err().is_terminal:
        yield lambda text: None
        return
    with err().status(what) as status:
        yield status.update
