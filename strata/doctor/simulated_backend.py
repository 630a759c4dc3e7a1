"""The planner's view of `--simulate`: what is really allocated here, in the memories of a recorded GPU machine.

Sizes are the numpy backend's, which computes; places and budgets are the CUDA backend's for the recorded facts, with
every memory divided by one number (`shrink`), so that a small model meets the machine as the report's model did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import TypeVar

import msgspec

from strata.doctor.budgets import Limits
from strata.doctor.candidates import HostChoice
from strata.doctor.cuda_backend import CONTEXT, GRAPHS, MODULES, PROCESS, CudaBackend
from strata.doctor.cuda_budgets import usable_vram
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts
from strata.doctor.gpus import Gpu, choose_gpu
from strata.doctor.numpy_backend import NumpyBackend
from strata.doctor.plan import Budget, DeviceRef, PlanOptions, Reservation, SharedBudget, Tier
from strata.doctor.request import DEFAULT_CONTEXT, Request
from strata.doctor.units import size
from strata.errors import Undetermined, UsageError
from strata.gguf import footprint
from strata.gguf.footprint import Size
from strata.gguf.model_facts import ModelFacts

_B = TypeVar("_B", Budget, SharedBudget)

SIMULATED = "simulated"  # as `PlanOptions.device` and `DeviceRef.backend`

_THREADS = 2  # the facts say how many the recorded machine has, not the one that computes
_USUAL_CHUNK = 128  # tokens; what the scale makes room for
_NEEDED_PART = 10  # of a report's model, a tenth has to be in VRAM whatever is cached: dense weights, head, KV
_LEAST_SHARE = Fraction(1, 16)  # of the experts; no card is made smaller than for this


@dataclass(frozen=True, slots=True)
class Shrink:
    """One number that every memory of the recorded machine is divided by."""

    by: Fraction

    @classmethod
    def of(cls, options: PlanOptions) -> Shrink:
        """Take it from a simulated plan's options; 1 where they name none."""
        return cls(Fraction(str(options.shrink or 1)))

    def down(self, nbytes: int) -> int:
        """Bytes of the small machine for `nbytes` of the recorded one."""
        return floor(nbytes / self.by)

    def up(self, nbytes: int | None) -> int | None:
        """The least bytes of the recorded machine that come down to `nbytes`."""
        return None if nbytes is None else ceil(nbytes * self.by)

    def recorded(self, options: PlanOptions) -> PlanOptions:
        """Return a person's options, which speak of the small machine, as they are for the recorded one."""
        return msgspec.structs.replace(
            options,
            vram_budget_bytes=self.up(options.vram_budget_bytes),
            ram_budget_bytes=self.up(options.ram_budget_bytes),
            pinned_budget_bytes=self.up(options.pinned_budget_bytes),
            vram_reserve_bytes=self.up(options.vram_reserve_bytes),
        )

    def limits(self, limits: Limits) -> Limits:
        """Return the small machine's limits; what is left beside a reserve comes down as one figure, so it is exact."""
        return Limits(
            tuple(self._small(budget) for budget in limits.budgets),
            tuple(self._small(shared) for shared in limits.shared),
            limits.notes,
        )

    def _small(self, budget: _B) -> _B:
        usable = self.down(budget.usable_bytes)
        left = self.down(budget.usable_bytes - budget.reserve_bytes)
        return msgspec.structs.replace(
            budget, usable_bytes=usable, reserve_bytes=usable - left, formula=f"({budget.formula}) / {self}"
        )

    def __str__(self) -> str:
        return f"{float(self.by):,.4g}"


class SimulatedBackend(NumpyBackend):
    """Implements `candidates.Backend`."""

    host_choices: tuple[HostChoice, ...] = CudaBackend.host_choices
    measured_lines: tuple[str, ...] = ("context",)

    def __init__(self, facts: Facts, model: ModelFacts, options: PlanOptions) -> None:
        # The numpy backend's own limits are not used; --vram-reserve-mib means nothing to it.
        super().__init__(facts, model, msgspec.structs.replace(options, vram_reserve_bytes=None))
        self._shrink = Shrink.of(options)
        self._gpu = choose_gpu(facts, options.gpu)
        cuda = CudaBackend(facts, model, self._shrink.recorded(options))
        self.device = DeviceRef(backend=SIMULATED, id=cuda.device.id, name=f"{cuda.device.name}, simulated")
        self.limits = self._shrink.limits(cuda.limits)
        self.speeds = replace(cuda.speeds, call_tokens=0, prompt_layer_s=0.0)  # the CPU runs chunks of any size
        self.threads = _THREADS
        self.notes = (
            f"The machine is simulated, every recorded memory divided by {self._shrink}. Lines hold what is really "
            "allocated here (on the CPU, weights as float32), and memory options speak of the small machine.",
        )

    def among(self, facts: Facts, options: PlanOptions) -> SimulatedBackend:
        """See `candidates.Backend`."""
        return SimulatedBackend(facts, self._model, options)

    def fixed_lines(self, request: Request, chunk: int, host: HostChoice) -> tuple[Reservation, ...]:
        """See `candidates.Backend`. What a GPU process takes besides is charged, and taken by the simulated driver."""
        lines = []
        for line in super().fixed_lines(request, chunk, host):
            if line.id == "context":
                lines += [self._context(), self._process()]
            elif line.id == "temporaries":
                lines.append(msgspec.structs.replace(line, tier=Tier.PAGEABLE, device="host"))
            else:
                lines.append(self._on_gpu(line))
        return tuple(lines)

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        return tuple(self._on_gpu(line) for line in super().expert_lines(slots, pinned, pageable))

    def _on_gpu(self, line: Reservation) -> Reservation:
        return msgspec.structs.replace(line, device=self.device.id) if line.tier is Tier.VRAM else line

    def _context(self) -> Reservation:
        nbytes, text = recorded_context(self._gpu)
        small = Size(self._shrink.down(nbytes), f"({text}) / {self._shrink}")
        return self._on_gpu(self._lines.line("context", "CUDA context, kernels, graphs", Tier.VRAM, small))

    def _process(self) -> Reservation:
        small = Size(self._shrink.down(PROCESS), f"{size(PROCESS)} / {self._shrink}")
        return self._lines.line("process", "Python, libraries, tokenizer", Tier.PAGEABLE, small)


def recorded_vram(facts: Facts, gpu: Gpu) -> Budget:
    """Return what the recorded machine's card offered when its facts were taken.

    Raises
    ------
    Undetermined
        The facts do not say.
    """
    try:
        return usable_vram(facts, gpu, PlanOptions())[0]
    except Undetermined as error:
        raise Undetermined(error.asked, error.found, "Give facts that hold the card's free VRAM") from None


def recorded_context(gpu: Gpu) -> tuple[int, str]:
    """Return the VRAM that a process takes on the recorded machine before any line, and how that comes about."""
    measured = gpu.cuda.context_bytes if gpu.cuda else None
    context = CONTEXT if measured is None else measured
    how = "assumed" if measured is None else "measured"
    return context + MODULES + GRAPHS, f"{size(context)} {how} + {size(MODULES)} + {size(GRAPHS)}"


def proportionate_shrink(
    facts: Facts, model: ModelFacts, options: PlanOptions, report_bytes: int | None
) -> tuple[float, str]:
    """Find what to divide by, so that the card holds as much of this model as it held of the report's.

    That is: all that must be in VRAM (dense weights, head, the KV cache of a usual context, the workspace of a usual
    chunk), and the same share of the experts. Only the model and the facts count, no option, so that the machine
    stays the same when options change.

    Parameters
    ----------
    report_bytes : int or None
        Size of the report's model; None is the file that the disk was tried with, else twice the card's free VRAM.

    Returns
    -------
    shrink : float
    sentence : str
        How it came about.

    Raises
    ------
    Undetermined
        The facts know no GPU, or nothing of its memory.
    """
    gpu = choose_gpu(facts, options.gpu)
    vram = recorded_vram(facts, gpu)
    free = vram.usable_bytes - vram.reserve_bytes - recorded_context(gpu)[0]
    if free <= 0:
        raise UsageError(
            f"simulate {gpu.name}", f"it has no VRAM free to speak of ({vram.formula})", "Give other facts"
        )
    disk = facts.disk.value
    known = report_bytes or (disk.file_bytes if disk else None)
    theirs = known or 2 * vram.usable_bytes
    needed = theirs // _NEEDED_PART
    share = min(max(Fraction(free - needed, theirs - needed), _LEAST_SHARE), Fraction(1))
    experts = ExpertSizes.of(model).total * footprint.expert_slot_size(model).bytes if model.experts else 0
    ours = _needed_here(model) + int(share * experts)
    shrink = float(f"{free / ours:.4g}")
    whose = f"the report's model of {size(known)}" if known else f"a model of {size(theirs)}, twice its free VRAM"
    room = f"{float(share):.0%} of this model's experts, as it had for {whose}" if experts else "this model"
    return shrink, f"The recorded memories are divided by {shrink:,.4g}, so that the card has room for {room}."


def _needed_here(model: ModelFacts) -> int:
    """Bytes that must be in VRAM whatever is cached, at a usual context and chunk."""
    context = min(model.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    kv, *_ = NumpyBackend.kv_types
    return (
        footprint.dense_size(model).bytes
        + footprint.head_size(model).bytes
        + footprint.kv_cache_size(model, context, kv).bytes
        + footprint.workspace_size(model, min(_USUAL_CHUNK, context), kv, _THREADS).bytes
        + footprint.logits(model).nbytes
    )
