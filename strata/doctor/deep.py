"""`--deep`: how much page-locked memory this system grants while the device holds what a model's plan puts there.

The order is the one that a run has: the plan without page-locked memory gives the device's part, which is held
(the ballast) while memory is page-locked, chunk by chunk, to what the model could use and no further. The plan is
then made again on what was granted.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from strata.doctor.budgets import usable_ram
from strata.doctor.facts import Facts, HostFacts, PinnedFacts, Probe, ProbeStatus
from strata.doctor.gather import DEEP_PIN_SHARE, GatherOptions, GatherWatch, gather, pinned_limit_s
from strata.doctor.gpus import choose_gpu
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.probes.request import LARGE_CHUNK, LEFT_FREE_BYTES
from strata.doctor.units import MIB, size
from strata.errors import Undetermined
from strata.gguf.model_facts import ModelFacts

_SCRATCH = 64 * MIB  # that the probe copies through, and a margin for what else moves
_OWN_CONTEXT = ("context",)  # the probe's process has a context of its own in its place


@dataclass(frozen=True)
class DeepProbe:
    """What will be taken, before it is.

    Attributes
    ----------
    device : int
        CUDA ordinal.
    ballast_bytes : int
        Device memory that is held, touched, while page-locking.
    pin_bytes : int
        Page-locked memory at which the probe stops by itself.
    left_free_bytes : int
        Device memory that stays free beside ballast and context.
    time_limit_s : float
        After which it is stopped, and what was granted until then counts.
    """

    device: int
    gpu: str
    ballast_bytes: int
    pin_bytes: int
    left_free_bytes: int
    time_limit_s: float

    @property
    def sentence(self) -> str:
        """What it takes and for how long, to be said before it begins."""
        return (
            f"--deep takes up to {size(self.pin_bytes)} of page-locked RAM, in pieces of at most "
            f"{size(LARGE_CHUNK)}, while it holds {size(self.ballast_bytes)} of {self.gpu} "
            f"({size(self.left_free_bytes)} stay free). It stops at the first refusal, or after "
            f"{self.time_limit_s:.0f} s, and gives everything back; so does Ctrl-C."
        )


def deep_options(options: PlanOptions) -> PlanOptions:
    """Return the options of the plans that `--deep` makes: they are for the GPU unless the person says otherwise."""
    return msgspec.structs.replace(options, device="cuda") if options.device == "auto" else options


def deep_probe(facts: Facts, model: ModelFacts, options: PlanOptions) -> DeepProbe:
    """Work out what to hold and how much to page-lock.

    Parameters
    ----------
    facts : Facts
        Gathered already; what they say of page-locked memory is not used.
    model : ModelFacts
    options : PlanOptions

    Raises
    ------
    Undetermined
        It cannot be measured here, or there is nothing to measure; it says why.
    """
    asked = f"measure page-locked memory for {model.name} (--deep)"
    options = deep_options(options)
    if options.device != "cuda":
        raise Undetermined(asked, "on the CPU nothing is page-locked", "Leave --device cpu out")
    gpu = choose_gpu(facts, options.gpu)
    if gpu.cuda is None or gpu.cuda.error is not None:
        why = gpu.cuda.error.message if gpu.cuda and gpu.cuda.error else "CUDA does not show it"
        raise Undetermined(asked, f"{gpu.name} cannot be used ({why})", "See the report")
    without = _with_pinned(facts, None)
    base = make_plan(without, model, msgspec.structs.replace(options, pinned_budget_bytes=0))
    if not base.feasible:
        found = base.shortfall.sentence if base.shortfall else "no plan fits"
        raise Undetermined(asked, found, "Change what the report says, then measure")
    ballast, left = _ballast(base, facts.host.value or HostFacts())
    need = _most_pinned(facts, model, options, ballast)
    if need <= 0:
        raise Undetermined(asked, "the best plan page-locks nothing: there is nothing to measure", "Run it")
    return DeepProbe(
        device=gpu.cuda.ordinal,
        gpu=gpu.name,
        ballast_bytes=ballast,
        pin_bytes=need,
        left_free_bytes=left,
        time_limit_s=pinned_limit_s(need),
    )


def measure(facts: Facts, probe: DeepProbe, watch: GatherWatch | None = None) -> Facts:
    """Return `facts` with page-locked memory as it was granted beside the ballast."""
    options = GatherOptions(
        groups=("host", "nvml", "pinned"),  # RAM and driver are looked at once more: they bound what may be done now
        device=probe.device,
        deep_pin_bytes=probe.pin_bytes,
        ballast_bytes=probe.ballast_bytes,
        time_limits_s={"pinned": probe.time_limit_s},
    )
    return msgspec.structs.replace(facts, pinned=gather(options, watch).pinned)


def _ballast(plan: AllocationPlan, host: HostFacts) -> tuple[int, int]:
    """Return the device memory to hold, and what stays free: the plan's reserve, or more where that is thin.

    Under WSL2 no more is held than the system has RAM: filling a card larger than that has crashed Windows.
    """
    context = sum(line.bytes for line in plan.reservations if line.id in _OWN_CONTEXT)
    budget = next(b for b in plan.budgets if b.tier is Tier.VRAM)
    left = max(budget.reserve_bytes, LEFT_FREE_BYTES + _SCRATCH)
    wanted = plan.planned_bytes(Tier.VRAM) - context
    if host.wsl == "wsl2" and host.ram_total_bytes is not None:
        wanted = min(wanted, host.ram_total_bytes)
    room = budget.usable_bytes - left - context
    return max(min(wanted, room), 0), max(left, budget.usable_bytes - context - wanted)


def _most_pinned(facts: Facts, model: ModelFacts, options: PlanOptions, ballast: int) -> int:
    """Return what the best plan would page-lock if the system granted all of the RAM that may be tried."""
    ram = int(usable_ram(facts, options).usable_bytes * DEEP_PIN_SHARE)
    asked = ram if options.pinned_budget_bytes is None else min(options.pinned_budget_bytes, ram)
    granted = PinnedFacts(asked_bytes=asked, granted_bytes=asked, ballast_bytes=ballast)
    return make_plan(_with_pinned(facts, granted), model, options).planned_bytes(Tier.PINNED)


def _with_pinned(facts: Facts, value: PinnedFacts | None) -> Facts:
    status = ProbeStatus.SKIPPED if value is None else ProbeStatus.OK
    return msgspec.structs.replace(facts, pinned=Probe(status=status, value=value))
