"""The smallest changes that turn a plan that does not fit into one that does.

One option is moved to the mildest value on its step at which a plan fits, so that the next milder step does not;
both are planned again before the change is offered. Feasibility is monotone in every option tried here, which
is what lets a bisection find that value. Options are tried in the order of what they cost the person: memory
limits of their own making first, then speed, then precision, the context last. Pairs are looked for only when no
single option does it, and only when no pair does, the smallest machine that would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TypeAlias

import msgspec

from strata.doctor.budgets import tier_names
from strata.doctor.plan import AllocationPlan, Change, PlanOptions, Tier
from strata.doctor.units import GIB, MIB, size

CONTEXT_STEP = 256  # tokens
MEMORY_STEP = MIB
LEAST_RESERVE = 128 * MIB  # of VRAM; below it, drivers alone could take what the plan needs
_MOST_MEMORY = 1 << 40  # bytes; a cap beyond every machine is no cap
_LEANER_KV = {"f32": ("f16", "int8"), "f16": ("int8",)}

Value: TypeAlias = int | str
Fits: TypeAlias = Callable[[PlanOptions], bool]


@dataclass(frozen=True, slots=True)
class Knob:
    """One option and the values it may move to, from the mildest change to the strongest.

    Attributes
    ----------
    field : str
        Of `PlanOptions`.
    values : sequence
    typed : callable
        Writes a value as the option is typed.
    said : callable
        Says what the change means, without a full stop.
    """

    field: str
    values: Sequence[Value]
    typed: Callable[[Value], str]
    said: Callable[[Value], str]

    def set(self, options: PlanOptions, value: Value) -> PlanOptions:
        """Return the options with this one moved to `value`."""
        return msgspec.structs.replace(options, **{self.field: value})

    def mildest(self, options: PlanOptions, fits: Fits) -> Value | None:
        """Return the mildest value that fits, given that all stronger ones then do."""
        if not self.values or not fits(self.set(options, self.values[-1])):
            return None
        return self.values[
            bisect_left(range(len(self.values)), True, key=lambda i: fits(self.set(options, self.values[i])))
        ]


def smallest_changes(plan: AllocationPlan, fits: Fits) -> tuple[Change, ...]:
    """Find every single option, else every pair, whose smallest change makes an infeasible plan feasible.

    Parameters
    ----------
    plan : AllocationPlan
        An infeasible one.
    fits : callable
        Plans again with other options and says whether that is feasible.

    Returns
    -------
    tuple of Change
        In the order of what they cost; empty when no pair of options is enough.
    """
    knobs = tuple(_knobs(plan))
    singles = [
        Change(option=knob.typed(value), sentence=f"{knob.said(value)}.")
        for knob in knobs
        if (value := knob.mildest(plan.options, fits)) is not None
    ]
    return tuple(singles or _pairs(plan.options, knobs, fits))


def _pairs(options: PlanOptions, knobs: tuple[Knob, ...], fits: Fits) -> Iterator[Change]:
    """The cheaper option of each pair goes as far as it can, so that the dearer one gives up as little as possible."""
    for cheap, dear in combinations([knob for knob in knobs if knob.values], 2):
        far = cheap.values[-1]
        moved = cheap.set(options, far)
        value = dear.mildest(moved, fits)
        if value is None:
            continue
        far = cheap.mildest(dear.set(options, value), fits) or far
        yield Change(
            option=f"{cheap.typed(far)} {dear.typed(value)}",
            sentence=f"{cheap.said(far)}, and {dear.said(value)[0].lower()}{dear.said(value)[1:]}.",
        )


def _knobs(plan: AllocationPlan) -> Iterator[Knob]:
    """Every option that can give something up here, the cheapest first."""
    o = plan.options
    for field, name, what in (
        ("ram_budget_bytes", "--ram-budget", "RAM"),
        ("vram_budget_bytes", "--vram-budget", tier_names(plan)[Tier.VRAM]),
    ):
        budget = getattr(o, field)
        if budget is not None:
            yield Knob(
                field,
                range((budget // MEMORY_STEP + 1) * MEMORY_STEP, _MOST_MEMORY, MEMORY_STEP),
                partial(_typed_budget, name),
                partial(_said_budget, what),
            )
    if plan.device.backend != "numpy":
        least = int(LEAST_RESERVE / (o.shrink or 1))
        reserve = next(budget.reserve_bytes for budget in plan.budgets if budget.tier is Tier.VRAM)
        yield Knob(
            "vram_reserve_bytes",
            range((reserve - 1) // MEMORY_STEP * MEMORY_STEP, least - 1, -MEMORY_STEP),
            lambda v: f"--vram-reserve-mib {int(v) // MIB}",
            lambda v: f"Leave {int(v) // MIB} MiB of VRAM free, which may slow down or stop if others take more",
        )
    if o.prefill is not None:
        yield Knob(
            "prefill",
            range(o.prefill - 1, 0, -1),
            lambda v: f"--prefill {v}",
            lambda v: f"Read prompts {v} tokens at a time, which is slower",
        )
    if o.expert_cache is not None:
        yield Knob(
            "expert_cache",
            range(o.expert_cache - 1, plan.experts.minimum_slots - 1, -1),
            lambda v: f"--expert-cache {v}",
            lambda v: f"Keep {v} expert slots, which means more misses",
        )
    if plan.kv in _LEANER_KV:
        yield Knob(
            "kv",
            _LEANER_KV[plan.kv],
            lambda v: f"--kv {v}",
            lambda v: f"Keep the KV cache as {v}, at less precision",
        )
    least = max(CONTEXT_STEP, o.prefill or 0)
    yield Knob(
        "max_context",
        range((plan.context - 1) // CONTEXT_STEP * CONTEXT_STEP, least - 1, -CONTEXT_STEP),
        lambda v: f"--max-context {v}",
        lambda v: f"Shorten the context to {v:,} tokens",
    )


def _typed_budget(option: str, value: Value) -> str:
    return f"{option} {typed_size(int(value))}"


def _said_budget(memory: str, value: Value) -> str:
    return f"Let it take {size(int(value))} of {memory}"


def typed_size(nbytes: int) -> str:
    """Write whole MiB as the command line reads them."""
    return f"{nbytes // GIB}GiB" if nbytes % GIB == 0 else f"{nbytes // MIB}MiB"
