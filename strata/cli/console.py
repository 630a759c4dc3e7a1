"""The console that everything but answers is printed on."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from strata.doctor.printable import printable


class PlainConsole(Console):
    """A console on which texts are shown and never obeyed: names, paths and logs may hold escape sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as `Console.render` does; its own control codes, of progress bars, stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
