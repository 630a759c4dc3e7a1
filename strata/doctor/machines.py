"""Other machines than the one at hand: the same facts with more memory, and the smallest that would do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec

from strata.doctor.budgets import NO_LIMIT
from strata.doctor.facts import Facts, HostFacts, NvmlFacts, NvmlGpu
from strata.doctor.gpus import choose_gpu
from strata.doctor.plan import Change, PlanOptions
from strata.doctor.units import MIB

Fits = Callable[[Facts, PlanOptions], bool]
_AMPLE_MIB = 1 << 24  # 16 TiB: more than any machine has


def with_ram(facts: Facts, nbytes: int) -> Facts:
    """Return the facts of the same machine with `nbytes` of RAM available, and no limit below that."""
    host = facts.host.value or HostFacts()
    changed = msgspec.structs.replace(
        host,
        ram_available_bytes=nbytes,
        ram_total_bytes=max(nbytes, host.ram_total_bytes or 0),
        cgroup_limit_bytes=None,
        address_space_limit_bytes=None,
        commit_limit_bytes=None,
        swap_free_bytes=None,
        unknown={**host.unknown, "cgroup_limit_bytes": NO_LIMIT, "address_space_limit_bytes": NO_LIMIT},
    )
    return msgspec.structs.replace(facts, host=msgspec.structs.replace(facts.host, value=changed))


def with_address_space(facts: Facts, nbytes: int | None) -> Facts:
    """Return the facts of the same machine with another limit on the process's address space, or with none."""
    host = msgspec.structs.replace(facts.host.value or HostFacts(), address_space_limit_bytes=nbytes)
    return msgspec.structs.replace(facts, host=msgspec.structs.replace(facts.host, value=host))


def with_vram(facts: Facts, gpu: str | None, nbytes: int) -> Facts:
    """Return the facts of a machine whose one GPU is that which `gpu` names here, with `nbytes` of VRAM free."""
    chosen = choose_gpu(facts, gpu)
    seen = chosen.nvml or NvmlGpu(index=chosen.index, name=chosen.name, uuid=chosen.uuid)
    nvml = NvmlFacts(gpus=(msgspec.structs.replace(seen, vram_free_bytes=nbytes),))
    cuda = facts.cuda.value
    if cuda is not None and chosen.cuda is not None:
        free = nbytes - (chosen.cuda.context_bytes or 0)
        cuda = msgspec.structs.replace(cuda, devices=(msgspec.structs.replace(chosen.cuda, vram_free_bytes=free),))
    return msgspec.structs.replace(
        facts,
        nvml=msgspec.structs.replace(facts.nvml, value=nvml),
        cuda=msgspec.structs.replace(facts.cuda, value=cuda),
    )


def smallest_machine(facts: Facts, options: PlanOptions, fits: Fits, *, on_gpu: bool) -> Change:
    """Say how much memory a machine needs for these options, budgets aside.

    Where this very machine would do if the process were let, the limit on its address space is named instead.

    Parameters
    ----------
    fits : callable
        Says whether there is a plan for a machine and options; monotone in every memory.
    on_gpu : bool
        The plan is for a GPU, so two memories are looked for; each is the least that does when the other is ample.
        Of a simulated GPU it is the recorded machine that is told of, whose facts these are.
    """
    host = facts.host.value
    if host and host.address_space_limit_bytes and fits(with_address_space(facts, None), options):
        limit = _least(lambda nbytes: fits(with_address_space(facts, nbytes), options))
        more = _mib(limit - host.address_space_limit_bytes)
        said = f"Raise the limit on this process's address space by {more} or more: ulimit -v unlimited."
        return Change(option="", sentence=said)
    free = msgspec.structs.replace(options, ram_budget_bytes=None, vram_budget_bytes=None, pinned_budget_bytes=None)
    ample = with_ram(facts, _AMPLE_MIB * MIB)
    gpu = options.gpu
    if not on_gpu:
        ram = _least(lambda nbytes: fits(with_ram(facts, nbytes), free))
        return _machine(f"A machine with {_mib(ram)} of available RAM")
    roomy = with_vram(facts, gpu, _AMPLE_MIB * MIB)
    vram = _least(lambda nbytes: fits(with_vram(ample, gpu, nbytes), free))
    ram = _least(lambda nbytes: fits(with_ram(roomy, nbytes), free))
    whose = f" (divided by {options.shrink:,.4g} here)" if options.shrink else ""
    return _machine(f"A card with {_mib(vram)} of free VRAM in a machine with {_mib(ram)} of available RAM{whose}")


def _least(fits: Callable[[int], bool]) -> int:
    return MIB * bisect_left(range(_AMPLE_MIB), True, key=lambda mib: fits(mib * MIB))


def _mib(nbytes: int) -> str:
    return f"{nbytes // MIB:,} MiB"  # exact: one less would not do


def _machine(what: str) -> Change:
    return Change(option="", sentence=f"{what} is the smallest that would do.")
