"""Progress on stderr, for everything that takes over a second; silent when stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.cli.output import err, say, unicode_ok
from strata.doctor.units import size

Steps = Callable[[str, int | None, int | None], None]  # what is being done, how much is done, how much it is in all


@contextmanager
def steps(unit: str = "bytes", *, aloud: bool = False) -> Iterator[Steps]:
    """Show one line for each step that is reported: a spinner, or a bar with speed where a total is known.

    Parameters
    ----------
    unit : str
        What is counted; bytes are shown in MiB and GiB.
    aloud : bool
        Where stderr is no terminal, name each step in a line of its own: for what takes minutes.

    Yields
    ------
    Steps
        To be called as often as wanted; a new description begins a new line.
    """
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class Amount(ProgressColumn):
        """Done, of all, and how fast; nothing where the total is not known."""

        def render(self, task: Task) -> Text:
            return Text("" if task.total is None else amount(task.completed, task.total, task.speed, unit))

    class Known(BarColumn):
        """A bar, where it is known how far it is."""

        def render(self, task: Task) -> ProgressBar | Text:  # type: ignore[override]
            return Text() if task.total is None else super().render(task)

    with Progress(
        SpinnerColumn(_spinner()),
        TextColumn("{task.description}"),
        Known(24),
        Amount(),
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


def amount(done: float, total: float, speed: float | None, unit: str) -> str:
    """Return "11.1 MiB of 73.9 MiB, 228.5 MiB/s" or "128 of 512 tokens, 560/s"; the speed where one is known."""
    if unit == "bytes":
        return f"{size(int(done))} of {size(int(total))}" + (f", {size(int(speed))}/s" if speed else "")
    return f"{int(done):,} of {int(total):,} {unit}" + (f", {speed:,.0f}/s" if speed else "")


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
    with err().status(what, spinner=_spinner()) as status:
        yield status.update


def _spinner() -> str:
    return "dots" if unicode_ok(sys.stderr) else "line"
