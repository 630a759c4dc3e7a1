"""After a refusal: what to plan once more with, knowing what was refused, and how to say it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from strata.doctor.budgets import TIER_NAMES
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.units import size
from strata.errors import AllocationFailed
from strata.runtime.memory import MemoryRefused
from strata.runtime.simulated import OUT_OF_MEMORY

# Where a pin was refused the edge is not sharp, so the next one keeps a fifth away from it.
_PART_AFTER_REFUSAL = 5, 4
# Of a line that was refused although the driver says that it is free: how much of it to hope for.
_PARTS_OF_IT = (1, 2), (3, 4), (7, 8)
_MEMORY_IS_FULL = (OUT_OF_MEMORY, errno.ENOMEM)


@dataclass(frozen=True)
class Retry:
    """What to plan once more with, and what to say first."""

    options: PlanOptions
    said: str

    @property
    def on_cpu(self) -> bool:
        """Whether the GPU is given up."""
        return self.options.device == "cpu"


def other_ways(plan: AllocationPlan, failed: AllocationFailed, *, may_use_cpu: bool) -> Iterator[Retry]:
    """Work out what to plan with after a refusal: less of that memory, or no GPU where none works.

    Parameters
    ----------
    plan : AllocationPlan
        Whose line was refused.
    failed : AllocationFailed
    may_use_cpu : bool
        The person did not insist on the GPU.

    Yields
    ------
    Retry
        The surest first; the first that a plan fits under is the one to take. None where no other plan can help.
    """
    line, cause = plan.line(failed.line), failed.__cause__
    if line is None or not isinstance(cause, MemoryRefused):
        return  # this machine's own RAM ran out, whatever it plays
    # What was promised stays: a saved plan's context and KV type, not today's defaults.
    promised = msgspec.structs.replace(plan.options, max_context=plan.context, kv=plan.kv)
    if cause.broken:
        if may_use_cpu:
            yield _without_gpu(promised)
        return
    before = _bytes_before(plan, failed.line)
    if line.tier is Tier.PINNED:
        granted, (over, under) = before + cause.granted_bytes, _PART_AFTER_REFUSAL
        pinned = granted * under // over if cause.code == OUT_OF_MEMORY else 0
        options = msgspec.structs.replace(promised, pinned_budget_bytes=pinned)
        most = f"at most {size(pinned)} page-locked" if pinned else "nothing page-locked"
        yield Retry(options, f"Planning once more: {most}, the rest in pageable RAM.")
        return
    if cause.code not in _MEMORY_IS_FULL:
        yield Retry(promised, "A little is granted, so this was not for want of memory: trying once more.")
        return
    # The driver's own figure is the best there is, unless the refusal belies it.
    free = cause.free_bytes
    believed = free is not None and free < failed.nbytes
    field, memory = ("vram_budget_bytes", "VRAM") if line.tier is Tier.VRAM else ("ram_budget_bytes", "RAM")
    for more in (free,) if believed and free is not None else [failed.nbytes * n // d for n, d in _PARTS_OF_IT]:
        options = msgspec.structs.replace(promised, **{field: before + more})
        yield Retry(options, f"Planning once more: at most {size(before + more)} of {memory}.")


def _without_gpu(options: PlanOptions) -> Retry:
    """Plan for the CPU: what was asked of the device's memories goes, what was asked of the model stays."""
    leaner = PlanOptions(device="cpu", max_context=options.max_context, kv=options.kv, prefill=options.prefill)
    return Retry(leaner, "Planning once more: on the CPU.")


def _bytes_before(plan: AllocationPlan, refused: str) -> int:
    """Return the bytes of the refused line's memory that the plan has in front of it: all of them were granted."""
    lines = plan.reservations
    place = next(place for place, line in enumerate(lines) if line.id == refused)
    tiers: tuple[Tier, ...] = (lines[place].tier,)
    if tiers == (Tier.PAGEABLE,):  # RAM is one memory for whatever lies in it
        tiers = next((shared.tiers for shared in plan.shared if shared.name == "RAM"), tiers)
    return sum(line.bytes for line in lines[:place] if line.tier in tiers)


def told(plan: AllocationPlan, failed: AllocationFailed, *, wsl: bool) -> tuple[str, ...]:
    """Name what was refused, then say so in the driver's words, and what that means; no full stops."""
    line, cause = plan.line(failed.line), failed.__cause__
    what = f'"{failed.line}" ({line.what})' if line else f'"{failed.line}"'
    where = TIER_NAMES[line.tier] if line else "memory"
    refused = f"{size(failed.nbytes)} of {where} for {what}"
    if not isinstance(cause, MemoryRefused):
        return refused, f"This machine itself refuses it: {failed.found}"
    words = str(cause)
    if cause.granted_bytes:
        words += f", after {size(cause.granted_bytes)} of it"
    if cause.around:
        words += f"; {cause.around}"
    elif cause.free_bytes is not None:
        counts = "system" if line and line.tier is Tier.PAGEABLE else "driver"
        words += f"; {size(cause.free_bytes)} free by the {counts}'s count"
    if cause.broken:
        meaning = "So is every other call, even for a little: no memory is full, the GPU cannot be used at all"
    elif line and line.tier is Tier.PINNED:
        meaning = f"The GPU itself works: this is {'WSL2' if wsl else 'the system'}'s budget for page-locked memory"
        meaning += "" if cause.code == OUT_OF_MEMORY else ", whatever the code says"
    else:
        return refused, words
    return refused, words, meaning


def say_refused(refused: tuple[str, ...], then: str) -> None:
    """Print a refusal, as `told` has it, and what comes of it to stderr, broken at the terminal's width."""
    from rich.padding import Padding
    from rich.text import Text

    from strata.cli.output import err

    what, *clauses = refused
    err().print(Text.assemble(("refused:", "yellow"), f" {what}"))
    for text in (*(f"{clause}." for clause in clauses), then):
        err().print(Padding(Text(text), (0, 0, 0, 2)))
    err().print()


def refusal(
    plan: AllocationPlan,
    failed: AllocationFailed,
    *,
    wsl: bool,
    again: bool = False,
    no_plan: AllocationPlan | None = None,
) -> AllocationFailed:
    """Make the last word: which line, which call, its code and name, what is free, under WSL2 or not, what to do."""
    what, *clauses = told(plan, failed, wsl=wsl)
    found = ". ".join((f"refused {what}", *clauses))
    found += ". This was the second plan" if again else ""
    if no_plan is not None and no_plan.shortfall is not None:
        found += f". Without it no plan fits: {no_plan.shortfall.sentence.removesuffix('.')}"
    found += f". {'WSL2' if wsl else 'Not WSL2'}; nothing stays allocated"
    return AllocationFailed(
        f"load {plan.model.name} on {plan.device.name}",
        found,
        _remedy(plan, failed, no_plan),
        line=failed.line,
        nbytes=failed.nbytes,
    )


def _remedy(plan: AllocationPlan, failed: AllocationFailed, no_plan: AllocationPlan | None) -> str:
    line, cause = plan.line(failed.line), failed.__cause__
    if isinstance(cause, MemoryRefused) and cause.broken:
        return "Run strata doctor, which says why the GPU cannot be used; without --device cuda the CPU stands in"
    if no_plan is None and line is not None and line.tier is Tier.PINNED:
        return "Use --pinned-budget 0MiB: nothing is page-locked then, which is slower"
    # A budget that was lowered for what was refused is not the person's to raise again.
    ours = ("--vram-budget", "--ram-budget", "--pinned-budget")
    changes = [c for c in (no_plan.changes if no_plan else ()) if c.option and not c.option.startswith(ours)]
    close = "Close other programs that use this memory and start again"
    return f"{close}, or use {changes[0].option}" if changes else close
