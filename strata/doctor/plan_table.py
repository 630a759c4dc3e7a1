"""A plan for people, as rich renderables: verdict, ledger, a bar for each memory, what was given up, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from strata.doctor.budgets import TIER_NAMES, tier_names
from strata.doctor.plan import AllocationPlan, Reservation, Tier
from strata.doctor.units import MIB, size

_WHERE = {Tier.VRAM: "VRAM", Tier.PINNED: "locked", Tier.PAGEABLE: "RAM", Tier.FILE: "file"}
_BAR_WIDTH = 60  # columns
_BAR_NAME_WIDTH = 15
_LEAST_BAR_WIDTH = 10
_NARROWEST_TABLE = 64


def plan_table(plan: AllocationPlan, *, unicode: bool = True, under: tuple[str, ...] = ()) -> RenderableType:
    """Lay out a plan; nothing is printed.

    Parameters
    ----------
    plan : AllocationPlan
    unicode : bool
        False draws rules and bars in ASCII.
    under : tuple of str
        Sentences to put under the verdict; where the plan's notes have them, they are not said twice.

    Returns
    -------
    rich renderable
        Reads well at 40 columns and at 200, without colour as well.
    """
    return _PlanTable(plan, unicode, under)


@dataclass(frozen=True)
class _PlanTable:
    """Lays a plan out for the width that it is printed at."""

    plan: AllocationPlan
    unicode: bool
    under: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, width = self.plan, options.max_width
        notes = tuple(note for note in plan.notes if note not in self.under)
        yield from (verdict(plan), *map(Text, self.under), Text())
        yield _ledger(plan, self.unicode) if width >= _NARROWEST_TABLE else _lines(plan)
        yield Text()
        bar = max(min(_BAR_WIDTH, width - _BAR_NAME_WIDTH - 3), _LEAST_BAR_WIDTH)
        yield from (_bar(*memory, self.unicode, bar) for memory in _memories(plan))
        yield from _speed(plan)
        yield from paragraph("Given up", plan.fallbacks) + _changes(plan) + paragraph("Notes", notes)


def verdict(plan: AllocationPlan) -> Text:
    """Say in one sentence whether the plan fits."""
    where = "the CPU" if plan.device.backend == "numpy" else plan.device.name
    if plan.shortfall:
        return Text.assemble(("does not fit", "bold red"), f": {plan.model.name} on {where}. ", plan.shortfall.sentence)
    what = f"{plan.context:,} tokens of context, prompts {plan.chunk:,} at a time"
    if plan.experts.total:
        share = plan.experts.slots / plan.experts.total
        what += f", {plan.experts.slots:,} of {plan.experts.total:,} experts ready ({share:.0%})"
    return Text.assemble(("fits", "bold green"), f": {plan.model.name} on {where}, {what}.")


def _ledger(plan: AllocationPlan, unicode: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, pad_edge=False, show_edge=False, expand=False)
    table.add_column("line", no_wrap=True, style="bold")
    table.add_column("where", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("what it is and how it came about", overflow="fold")
    for line in plan.reservations:
        table.add_row(
            line.id,
            _where(plan, line),
            f"{line.bytes / MIB:,.1f}",
            Text.assemble(line.what, (f": {line.formula}", "dim")),
        )
    return table


def _lines(plan: AllocationPlan) -> RenderableType:
    """The ledger where a table would leave no room for words: the figures, and under them what they are."""
    lines = [
        Group(
            Text(f"{line.id:<17}{_where(plan, line):<7}{f'{line.bytes / MIB:,.1f} MiB':>15}", "bold"),
            Padding(Text.assemble(line.what, (f": {line.formula}", "dim")), (0, 0, 0, 2)),
        )
        for line in plan.reservations
    ]
    return Group(*lines)


def _where(plan: AllocationPlan, line: Reservation) -> str:
    return "RAM" if plan.device.backend == "numpy" and line.tier is not Tier.FILE else _WHERE[line.tier]


def _memories(plan: AllocationPlan) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, bytes used, reserve and usable of each memory: shares of another one only where they are capped."""
    ram = next((memory for memory in plan.shared if memory.name == "RAM"), None)
    for budget in plan.budgets:
        share = ram is not None and budget.tier in ram.tiers
        if not share or (ram and 0 < budget.usable_bytes < ram.usable_bytes):
            used = plan.planned_bytes(budget.tier, budget.device)
            name = tier_names(plan)[budget.tier].removeprefix("RAM within ")
            yield name, used, budget.reserve_bytes, budget.usable_bytes
    for memory in plan.shared:
        used = sum(plan.planned_bytes(tier) for tier in memory.tiers)
        yield memory.name, used, memory.reserve_bytes, memory.usable_bytes


def _bar(name: str, used: int, reserve: int, usable: int, unicode: bool, width: int) -> Text:
    """Draw one memory: used, kept free, left over; where too much is asked, all of it."""
    over = used + reserve - usable
    whole = max(usable, used + reserve, 1)
    ends = [ceil(width * part / whole) for part in (used, used + reserve, whole)]
    full, kept, free = "█▒░" if unicode else "#=."
    bar = full * ends[0] + kept * (ends[1] - ends[0]) + free * (ends[2] - ends[1])
    rest = Text(f"{size(over)} too much", "bold red") if over > 0 else Text(f"{size(-over)} left")
    numbers = f"{size(used)} used + {size(reserve)} kept free of {size(usable)}, "
    return Text.assemble((f"{name:<{_BAR_NAME_WIDTH}}", "bold"), f" [{bar}]\n  {numbers}", rest)


def _speed(plan: AllocationPlan) -> list[RenderableType]:
    if not plan.expected:
        return []
    e = plan.expected
    (slow, fast), (slow_prompt, fast_prompt) = e.decode_tokens_per_s, e.prefill_tokens_per_s
    names = TIER_NAMES | ({Tier.VRAM: "RAM"} if plan.device.backend == "numpy" else {})
    read = ", ".join(f"{size(nbytes)} from {names[tier]}" for tier, nbytes in e.bytes_per_token.items())
    sentences = (
        f"Answers {_rate(slow)} to {_rate(fast)} tokens/s, prompts {_rate(slow_prompt)} to {_rate(fast_prompt)}.",
        f"A token of an answer reads {read}.",
    )
    return paragraph("Expected", sentences + e.basis)


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


def _changes(plan: AllocationPlan) -> list[RenderableType]:
    return paragraph(
        "Any one of these makes it fit", tuple(f"{c.option:<24} {c.sentence}".strip() for c in plan.changes)
    )


def paragraph(title: str, sentences: tuple[str, ...]) -> list[RenderableType]:
    """A title and its sentences, hanging under it; nothing when there are none."""
    if not sentences:
        return []
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row(" -", Text(sentence))
    return [Text(), Text(title, "bold"), table]
