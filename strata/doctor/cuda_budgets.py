"""What a GPU, the RAM behind it and the system between them offer. The rules of `budgets` hold here too."""

from __future__ import annotations

from strata.doctor.budgets import Limits, UsableRam, usable_ram
from strata.doctor.facts import Facts, HostFacts
from strata.doctor.gpus import Gpu
from strata.doctor.plan import HOST, Budget, PlanOptions, SharedBudget, Tier
from strata.doctor.units import MIB, size
from strata.errors import Undetermined

RESERVE = 256 * MIB
DISPLAY_RESERVE = 1024 * MIB
WDDM_RESERVE = 256 * MIB
# Where a pin was refused the edge is not sharp: the same call has succeeded a little above and failed a little below.
_PART_AFTER_REFUSAL = 5, 4


def is_windows(host: HostFacts) -> bool:
    """Say whether the display driver model of Windows manages this process's GPU memory directly."""
    return host.os == "windows"


def cuda_limits(facts: Facts, gpu: Gpu, options: PlanOptions) -> Limits:
    """Gather every bound of a plan for `gpu`: its VRAM, page-locked and pageable RAM, and what couples them.

    RAM is one memory for both host tiers, and on an integrated GPU for VRAM too. On Windows reports disagree on what
    couples page-locked memory with VRAM, so a plan holds under each of the three that are told of: one budget for
    both (here: they fit into the card together, unless more was measured with VRAM filled); device
    allocations refused once much is page-locked (met by order: the device's memory is taken first, pinning comes
    last); and everything, VRAM included, charged against the commit limit.
    """
    host = facts.host.value or HostFacts()
    ram = usable_ram(facts, options)
    vram, vram_notes = usable_vram(facts, gpu, options)
    pinned, pinned_notes = usable_pinned(facts, options, ram)
    pageable = Budget(
        tier=Tier.PAGEABLE,
        device=HOST,
        usable_bytes=ram.usable_bytes,
        reserve_bytes=0,
        formula="a share of RAM",
        source="RAM",
    )
    integrated = gpu.cuda is not None and bool(gpu.cuda.integrated)
    tiers = (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE) if integrated else (Tier.PINNED, Tier.PAGEABLE)
    shared = [
        SharedBudget(
            name="RAM",
            tiers=tiers,
            usable_bytes=ram.usable_bytes,
            reserve_bytes=ram.reserve_bytes,
            formula=ram.formula,
            source=ram.source,
        )
    ]
    notes = ram.notes + vram_notes + pinned_notes
    if is_windows(host):
        shared.append(_vram_with_pinned(facts, vram))
        commit = _commit(host)
        if commit is None:
            notes += ("The commit limit of Windows is unknown: a small page file could still refuse VRAM.",)
        else:
            shared.append(commit)
    return Limits((vram, pinned, pageable), tuple(shared), notes)


def usable_vram(facts: Facts, gpu: Gpu, options: PlanOptions) -> tuple[Budget, tuple[str, ...]]:
    """Return what this process may take of the card, context and reserve included.

    The driver and CUDA can disagree by a gigabyte (a budget against physical memory): the lower one counts, each
    taken as it was before this process's own context. Under WSL2 a card larger than the machine behind it has
    crashed the host, so no more than twice the RAM that WSL2 sees, its default share being half, is used.

    Raises
    ------
    Undetermined
        Neither could be read and no ``--vram-budget`` was given.
    """
    host = facts.host.value or HostFacts()
    notes: list[str] = []
    terms: list[tuple[int, str]] = []
    if gpu.nvml and gpu.nvml.vram_free_bytes is not None:
        terms.append((gpu.nvml.vram_free_bytes, f"driver: {size(gpu.nvml.vram_free_bytes)} free"))
    if gpu.cuda and gpu.cuda.vram_free_bytes is not None:
        context = gpu.cuda.context_bytes or 0  # unknown: what CUDA calls free after its context is surely free
        terms.append((gpu.cuda.vram_free_bytes + context, f"CUDA: {size(gpu.cuda.vram_free_bytes + context)} free"))
    asked = options.vram_budget_bytes
    if not terms:
        if asked is None:
            raise Undetermined(
                f"find out how much VRAM {gpu.name} has free",
                "neither the driver nor CUDA says",
                "Give --vram-budget, such as --vram-budget 8GiB",
            )
        notes.append(f"The VRAM budget of {size(asked)} is as given and not verified.")
    if terms and host.wsl == "wsl2" and host.ram_total_bytes is not None:
        terms.append((2 * host.ram_total_bytes, f"WSL2: twice its {size(host.ram_total_bytes)} of RAM"))
    if asked is not None:
        terms.append((asked, f"--vram-budget: {size(asked)}"))
    reserve, why, reserve_notes = vram_reserve(host, gpu, options)
    budget = Budget(
        tier=Tier.VRAM,
        device=gpu.uuid,
        usable_bytes=min(nbytes for nbytes, _ in terms),
        reserve_bytes=reserve,
        formula=f"{_least(terms)}; {size(reserve)} kept free {why}",
        source="the lower figure for free VRAM",
    )
    return budget, (*notes, *reserve_notes)


def vram_reserve(host: HostFacts, gpu: Gpu, options: PlanOptions) -> tuple[int, str, tuple[str, ...]]:
    """Return the VRAM to leave free, why, and notes.

    A quarter GiB covers what drivers take between plan and load; a desktop grows by most of a GiB while it is
    used; and where Windows manages the memory, natively or under WSL2, an overfull card is not refused but slowed
    to a tenth of its speed, so another quarter GiB is kept.
    """
    if options.vram_reserve_bytes is not None:
        return options.vram_reserve_bytes, "(--vram-reserve-mib)", ()
    paged = is_windows(host) or host.wsl == "wsl2"
    extra = WDDM_RESERVE if paged else 0
    drawn = gpu.nvml.display_active if gpu.nvml else None
    if gpu.uuid.startswith("MIG-"):  # NVML knows the whole card, not the slice
        return RESERVE + extra, "(a MIG slice draws no desktop)", ()
    if drawn is None:
        note = "Whether the card drives a desktop is unknown: the reserve is that of one that does."
        return DISPLAY_RESERVE + extra, "for a desktop that may be drawn on it", (note,)
    if drawn:
        return DISPLAY_RESERVE + extra, "for the desktop that is drawn on it", ()
    return RESERVE + extra, "(no desktop is drawn on it)", ()


def usable_pinned(facts: Facts, options: PlanOptions, ram: UsableRam) -> tuple[Budget, tuple[str, ...]]:
    """Return what may be page-locked: what was granted when tried, never a guess.

    Without a measurement nothing is planned to be pinned, which always starts; ``--pinned-budget`` is then taken at its
    word, since pinning is verified by pinning. Windows grants half of RAM at most.
    """
    host = facts.host.value or HostFacts()
    asked = options.pinned_budget_bytes
    probe = facts.pinned.value
    notes: tuple[str, ...] = ()
    if probe is not None and (probe.granted_bytes or probe.refusal):
        granted = probe.granted_bytes
        text = f"{size(granted)} granted when tried"
        if probe.refusal is not None:
            over, under = _PART_AFTER_REFUSAL
            granted = granted * under // over
            text += f", more was refused: {under}/{over} of it"
        elif asked is not None and asked > granted:
            granted = asked
            notes = (
                f"Page-locking was tried up to {size(probe.granted_bytes)} only; more is as --pinned-budget says.",
            )
    elif asked is not None:
        granted, text = asked, "as given"
        notes = ("The budget for page-locked memory was not measured; it is as --pinned-budget says.",)
    else:
        granted, text = 0, "not measured, so none is planned"
        notes = (
            "Page-locked memory was not measured, so none is planned: strata doctor MODEL measures it, "
            "--pinned-budget sets it.",
        )
    terms = [(granted, text), (ram.usable_bytes, f"RAM: {size(ram.usable_bytes)}")]
    if is_windows(host) and host.ram_total_bytes is not None:
        terms.append((host.ram_total_bytes // 2, "half of RAM, Windows' limit"))
    if asked is not None:
        terms.append((asked, f"--pinned-budget: {size(asked)}"))
    budget = Budget(
        tier=Tier.PINNED,
        device=HOST,
        usable_bytes=min(nbytes for nbytes, _ in terms),
        reserve_bytes=0,
        formula=_least(terms),
        source="pinning tried" if probe else "--pinned-budget" if asked is not None else "nothing",
    )
    return budget, notes


def _vram_with_pinned(facts: Facts, vram: Budget) -> SharedBudget:
    """Windows, first coupling: one budget for both, as large as the card, or as was held at once when tried."""
    tried = facts.pinned.value
    together = tried.ballast_bytes + tried.granted_bytes if tried else 0
    terms = f"the card's {size(vram.usable_bytes)}"
    if tried:
        terms = f"the larger of {terms} and the {size(together)} held at once when tried"
    return SharedBudget(
        name="VRAM + locked",
        tiers=(Tier.VRAM, Tier.PINNED),
        usable_bytes=max(vram.usable_bytes, together),
        reserve_bytes=vram.reserve_bytes,
        formula=terms,
        source="reports of one budget for both under WDDM",
    )


def _commit(host: HostFacts) -> SharedBudget | None:
    """Windows, third coupling: RAM and page file bound everything that is promised, VRAM included."""
    if host.commit_limit_bytes is not None and host.commit_used_bytes is not None:
        left = max(host.commit_limit_bytes - host.commit_used_bytes, 0)
        formula = f"{size(host.commit_limit_bytes)} limit - {size(host.commit_used_bytes)} promised"
    elif host.ram_available_bytes is not None and host.swap_free_bytes is not None:
        left = host.ram_available_bytes + host.swap_free_bytes
        formula = f"{size(host.ram_available_bytes)} of RAM + {size(host.swap_free_bytes)} of page file are free"
    else:
        return None
    return SharedBudget(
        name="commit limit",
        tiers=(Tier.VRAM, Tier.PINNED, Tier.PAGEABLE),
        usable_bytes=left,
        reserve_bytes=0,
        formula=formula,
        source="Windows charges VRAM against it",
    )


def _least(terms: list[tuple[int, str]]) -> str:
    """Write the least of several terms as a formula; the texts carry the numbers."""
    least, *more = sorted(terms, key=lambda term: term[0])
    return least[1] + (f" (other bounds: {', '.join(text for _, text in more)})" if more else "")
