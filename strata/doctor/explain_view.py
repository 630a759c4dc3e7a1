"""What is known of an error text, as renderables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from strata.doctor.explain import NOT_KNOWN, Explanation
from strata.doctor.report import Trimmed, rows
from strata.doctor.units import counted

LONGEST = 200  # characters shown of a recognised line


def explanations_view(explanations: Sequence[Explanation]) -> RenderableType:
    """Return each recognised error with its line, cause and remedy, or that nothing is known."""
    if not explanations:
        return Trimmed(Text(NOT_KNOWN))
    parts: list[RenderableType] = []
    for found in explanations:
        or_more = " or more" if found.or_more else ""
        times = f", {counted(found.times, 'time')}{or_more}" if found.times > 1 else ""
        line = found.line if len(found.line) <= LONGEST else found.line[: LONGEST - 3] + "..."
        lines = [
            (Text(f"line {found.line_number}"), Text(line + times)),
            (Text("cause"), Text(found.cause[0].upper() + found.cause[1:] + ".")),
            (Text("fix"), Text(found.remedy, style="bold")),
        ]
        if found.check:
            lines.append((Text("more"), Text(f"strata doctor --explain {found.check}")))
        parts += [Text(found.title, style="bold"), Padding(rows(lines), (0, 0, 1, 2))]
    return Trimmed(Group(*parts))
