"""The model and its plan on this machine."""

from __future__ import annotations

from strata.doctor.budgets import tier_names, usable_ram
from strata.doctor.checks.check import Result, check, fail, passed, unknown, warn
from strata.doctor.checks.machine import Machine
from strata.doctor.plan import HOST, PlanOptions, Tier
from strata.doctor.units import counted, size
from strata.errors import Undetermined

NAMES = {"embedding": "the embedding", "staging_ring": "the ring that experts pass through"}


def ram_now(m: Machine) -> int | None:
    """Return the RAM that a process may take now, as plans count it; None when unknown."""
    try:
        return usable_ram(m.facts, PlanOptions()).usable_bytes
    except Undetermined:
        return None


@check("STR-RAM-SHORT", "RAM for the model", needs=("model", "host.ram_available_bytes"), essential=True)
def ram_short(m: Machine) -> Result | None:
    """When the model's weights exceed RAM and VRAM together, experts are read from the disk again and again: the disk
    light never stops. The plan says how many; the shortfall is named before anything starts."""
    ram = ram_now(m)
    if m.model is None or ram is None:
        return passed("RAM and VRAM hold the model.")
    vram = max((gpu.vram_free_bytes or 0 for gpu in m.nvml.gpus), default=0)
    short = m.model.file_bytes - ram - vram
    evidence = (
        m.says("model", f"{m.model.name}: {size(m.model.file_bytes)}"),
        m.says("host.ram_available_bytes", f"RAM usable {size(ram)}"),
        m.says("nvml.gpus", f"VRAM free {size(vram)}"),
    )
    if short <= 0:
        return passed("RAM and VRAM hold the model.", *evidence)
    if (gap := m.missing("nvml.gpus.vram_free_bytes")) and not gap.not_here:
        return unknown("RAM alone does not hold the model, and how much VRAM is free is not known.", *evidence[:2])
    return warn(
        f"The model is {size(short)} larger than usable RAM and free VRAM together: experts stay in the file.",
        *evidence,
        remedy=m.per_os(
            linux="Close other programs, add RAM, or take a smaller quantisation of the model",
            windows="Close other programs, add RAM, or take a smaller quantisation of the model",
            wsl="Give WSL2 more RAM: %USERPROFILE%\\.wslconfig: [wsl2] memory=...; then: wsl --shutdown",
        ),
    )


@check("STR-PLAN-FIT", "The plan fits", needs=("plan",), essential=True)
def fits(m: Machine) -> Result | None:
    """Every byte has a line in the plan. Where one does not fit, the plan names it, the bytes that are missing, and the
    smallest change that works: on 6 to 8 GB cards the dense part, the KV cache and the reserve alone may exceed the
    card."""
    if m.plan is None:
        return passed("The plan fits.")
    sentence = m.plan.shortfall.sentence if m.plan.shortfall else ""
    names = tier_names(m.plan)
    budgets = (m.says("plan", f"{names[b.tier]}: {size(b.usable_bytes)} usable ({b.formula})") for b in m.plan.budgets)
    if m.plan.feasible:
        return passed(f"{m.plan.model.name} fits with a context of {m.plan.context:,} tokens.", *budgets)
    changes = "; or ".join(change.option for change in m.plan.changes)
    on_gpu = m.plan.device.backend != "numpy"  # whose device memory is RAM
    short_of_vram = on_gpu and (m.plan.shortfall is None or m.plan.shortfall.tier is Tier.VRAM)
    more = "A card with more memory" if short_of_vram else "More RAM"
    return fail(
        sentence or "The plan does not fit this machine.",
        *budgets,
        remedy=f"Smallest change that works: {changes}" if changes else f"{more}, or a smaller model",
    )


@check("STR-PLAN-FALLBACK", "What the plan gives up", needs=("plan",))
def fallbacks(m: Machine) -> Result | None:
    """A plan that fits may have given something up for want of page-locked memory: the embedding, the staging ring or
    experts lie in pageable RAM, from where they are copied more slowly. That not every expert has a slot in VRAM is
    what plans are for, and no finding."""
    if m.plan is None or not m.plan.feasible:
        return None if m.plan else passed("Nothing was given up.")
    said = [m.says("plan", sentence) for sentence in m.plan.fallbacks]
    lines = {line.id: line for line in m.plan.reservations}
    unlocked = [NAMES[id] for id in NAMES if id in lines and lines[id].tier is not Tier.PINNED]
    if m.plan.experts.pageable:
        unlocked.append(counted(m.plan.experts.pageable, "expert"))
    granted = next((b for b in m.plan.budgets if b.tier is Tier.PINNED), None)
    if not said or not unlocked or granted is None or m.plan.device.backend != "cuda":
        return passed("Nothing was given up for want of page-locked memory.", *said)
    return warn(
        f"Not page-locked, and so slower: {', '.join(unlocked)}; {size(granted.usable_bytes)} may be page-locked.",
        *said,
        remedy="strata doctor MODEL --deep measures how much is granted; strata plan MODEL shows every line",
    )


@check("STR-PLAN-NOW", "Memory the plan rests on", needs=("plan", "host.ram_available_bytes"))
def still_there(m: Machine) -> Result | None:
    """A saved plan rests on memory that was free when it was made. If less is usable now, it is refused at start; a
    new plan is made in a second."""
    ram = ram_now(m)
    if m.plan is None or ram is None or not m.plan.feasible:
        return None if m.plan else passed("The plan's memory is there.")
    on_host = sum(r.bytes for r in m.plan.reservations if r.device == HOST and r.tier != "file")
    if on_host <= ram:
        return passed("The plan's memory is there.")
    return fail(
        f"The plan takes {size(on_host)} of RAM, {size(on_host - ram)} more than is usable now.",
        m.says("plan", f"host reservations {size(on_host)}"),
        m.says("host.ram_available_bytes", f"usable {size(ram)}"),
        remedy="Plan anew: strata plan MODEL -o plan.json",
    )


@check("STR-MODEL-CONTEXT", "Context the model was trained for", needs=("model",))
def context(m: Machine) -> Result | None:
    """Beyond the context a model was trained for its answers lose their thread, while the KV cache still costs memory
    for every token."""
    asked, trained = m.options.max_context, m.model.context_length if m.model else None
    if asked is None or trained is None or asked <= trained:
        return passed("The context asked for is one the model knows.")
    return warn(
        f"--max-context {asked:,} exceeds the {trained:,} tokens the model was trained for.",
        m.says("model", f"context_length {trained:,}"),
        remedy=f"--max-context {trained}",
    )
