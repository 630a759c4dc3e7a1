"""`--simulate FACTS`: a recorded machine, made small enough for the model, as facts, options and memories."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.doctor.budgets import usable_ram
from strata.doctor.cuda_budgets import cuda_limits
from strata.doctor.cuda_codes import NAMES, TEXTS
from strata.doctor.facts_io import read_facts
from strata.doctor.gpus import choose_gpu
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.simulated_backend import (
    SIMULATED,
    Shrink,
    proportionate_shrink,
    recorded_context,
    recorded_vram,
)
from strata.doctor.units import GIB, MIB, PAGE, round_up
from strata.errors import Undetermined, UsageError
from strata.runtime.simulated import Fault, SimulatedMachine

if TYPE_CHECKING:
    from strata.doctor.facts import CudaFacts, Facts, Probe
    from strata.gguf.model_facts import ModelFacts

_PIN_STEP = 64 * MIB  # where no chunk was recorded
_NO_LIMIT = 1 << 20  # GiB


class Coupling(StrEnum):
    """What couples VRAM and page-locked memory; see `SimulatedMachine`."""

    SHARED = "shared"
    REGISTERED = "registered"
    COMMIT = "commit"


class Simulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section "simulation" of a facts file: what facts cannot say. Bytes are the recorded machine's."""

    model_bytes: int | None = None  # size of the report's model
    vram_granted_bytes: int | None = None  # free, as the driver grants; None: the lower recorded figure
    vram_taken_bytes: int = 0  # by someone else, after the plan was made
    pinned_bytes: int | None = None  # page-locked; None: as recorded
    couplings: tuple[Coupling, ...] | None = None  # None: under Windows all three, elsewhere none
    registered_bytes: int = 0  # of the coupling of that name
    faults: tuple[Fault, ...] | None = None  # None: the recorded error of CUDA, for all its calls


class _Document(msgspec.Struct):
    simulation: Simulation = Simulation()


@dataclass(frozen=True)
class Simulated:
    """A recorded machine, ready to plan for and to load on. `machine` is small; `facts` are as recorded."""

    facts: Facts
    machine: SimulatedMachine
    options: PlanOptions
    notes: tuple[str, ...]
    may_use_cpu: bool  # when its GPU turns out to be unusable


def simulate(path: Path, model: ModelFacts, options: PlanOptions, *, shrink: float | None = None) -> Simulated:
    """Read a recorded machine and make it small.

    Parameters
    ----------
    path : Path
        Facts, as `strata doctor --save-facts` writes them; they may have a section "simulation", see `Simulation`.
    model : ModelFacts
        What will run.
    options : PlanOptions
        As typed.
    shrink : float, optional
        What to divide its memories by; None is in proportion to the models.

    Raises
    ------
    UsageError
        The file or an option makes no sense.
    Undetermined
        The facts know no GPU, or nothing of its memory.
    """
    if options.device == "cpu":
        raise UsageError(
            "simulate a recorded machine (--simulate) with --device cpu",
            "it is the memory of its GPU that is simulated",
            "Leave --device out",
        )
    facts = read_facts(path)
    try:
        asked = msgspec.json.decode(path.read_bytes(), type=_Document).simulation
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"simulate {path}", f'its section "simulation" is wrong: {error}', "Correct it") from None
    try:
        choose_gpu(facts, options.gpu)
    except Undetermined as error:
        raise Undetermined(
            f"simulate the GPU of {path}", error.found, "Give facts of a machine whose GPU was seen"
        ) from None
    notes: tuple[str, ...] = ()
    if shrink is None:
        shrink, sentence = proportionate_shrink(facts, model, options, asked.model_bytes)
        notes = (sentence,)
    elif not 0 < shrink < inf:
        raise UsageError(f"divide the memories by {shrink:g}", "it has to be a number above 0", "Leave it out")
    options_of_it = msgspec.structs.replace(options, device=SIMULATED, shrink=shrink)
    machine = _machine(facts, asked, options, Shrink.of(options_of_it))
    return Simulated(facts, machine, options_of_it, notes, may_use_cpu=options.device == "auto")


def _machine(facts: Facts, asked: Simulation, options: PlanOptions, small: Shrink) -> SimulatedMachine:
    gpu = choose_gpu(facts, options.gpu)
    usable = recorded_vram(facts, gpu).usable_bytes
    told = gpu.nvml.vram_free_bytes if gpu.nvml else None
    tried = facts.pinned.value
    step = (tried and tried.largest_chunk_bytes) or _PIN_STEP
    pinned = asked.pinned_bytes
    if pinned is None and tried is not None and tried.refusal is not None:
        pinned = tried.granted_bytes
    couplings = asked.couplings
    if couplings is None:
        couplings = tuple(Coupling) if facts.host.value and facts.host.value.os == "windows" else ()
    shared, commit = _coupled(facts, options)
    faults = _recorded_faults(facts.cuda) if asked.faults is None else asked.faults
    return SimulatedMachine(
        vram_told_bytes=small.down(usable if told is None else told),
        vram_bytes=small.down(usable if asked.vram_granted_bytes is None else asked.vram_granted_bytes),
        vram_taken_bytes=small.down(asked.vram_taken_bytes),
        context_bytes=small.down(recorded_context(gpu)[0]),
        pinned_bytes=None if pinned is None else small.down(pinned),
        pin_step_bytes=round_up(max(small.down(step), 1), PAGE),
        ram_bytes=_ram(facts, small),
        integrated=bool(gpu.cuda and gpu.cuda.integrated),
        shared_bytes=small.down(shared) if Coupling.SHARED in couplings else None,
        registered_bytes=small.down(asked.registered_bytes) if Coupling.REGISTERED in couplings else None,
        commit_bytes=small.down(commit) if Coupling.COMMIT in couplings else None,
        faults=tuple(_named(msgspec.structs.replace(f, from_bytes=small.down(f.from_bytes))) for f in faults),
    )


def _ram(facts: Facts, small: Shrink) -> int | None:
    try:
        return small.down(usable_ram(facts, PlanOptions()).usable_bytes)
    except Undetermined:  # the plan rests on --ram-budget then, and nothing is known to refuse it
        return None


def _coupled(facts: Facts, options: PlanOptions) -> tuple[int, int]:
    """Return what VRAM and page-locked memory have together, and the commit limit, as they are in Windows' plans.

    A machine of another system gets the same: VRAM and, of what was tried, whatever was held at once beside it.
    """
    gpu = choose_gpu(facts, options.gpu)
    limits = cuda_limits(facts, gpu, PlanOptions(ram_budget_bytes=_NO_LIMIT * GIB))
    usable = {shared.name: shared.usable_bytes for shared in limits.shared}
    vram = next(budget.usable_bytes for budget in limits.budgets if budget.tier is Tier.VRAM)
    return usable.get("VRAM + locked", vram), usable.get("commit limit", _NO_LIMIT * GIB)


def _named(fault: Fault) -> Fault:
    """Give a code its name and text where the file leaves them out."""
    if "cuda".startswith(fault.call[:4]):
        name, text = NAMES.get(fault.code, "unknown"), TEXTS.get(fault.code, "unknown error")
    else:
        name, text = errno.errorcode.get(fault.code, "unknown"), os.strerror(fault.code)
    return msgspec.structs.replace(fault, name=fault.name or name, string=fault.string or text)


def _recorded_faults(cuda: Probe[CudaFacts]) -> tuple[Fault, ...]:
    """Every call of CUDA ends as the first one did when the facts were taken, if that had a code."""
    error = cuda.error
    if error is None or error.code is None:
        return ()
    return (Fault(code=error.code, name=error.name or "", string=error.message),)
