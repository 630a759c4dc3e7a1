"""What a plan gave up, in words: one sentence for every step down a ladder."""

from __future__ import annotations

from strata.doctor.budgets import TIER_NAMES
from strata.doctor.candidates import Backend
from strata.doctor.plan import Reservation, Tier
from strata.doctor.request import Request
from strata.doctor.speed import Placement
from strata.doctor.units import size


def given_up(backend: Backend, request: Request, fixed: tuple[Reservation, ...], where: Placement) -> tuple[str, ...]:
    """Return a sentence for everything that a larger memory would have made better."""
    total = backend.experts.total
    sentences = []
    if where.chunk < request.chunks[0]:
        sentences.append(
            f"Prompts are read {where.chunk} tokens at a time instead of {request.chunks[0]}: "
            "a larger workspace would have cost more than it gains."
        )
    best = backend.host_choices[0]
    if where.embedding is not best.embedding:
        usable = next(b.usable_bytes for b in backend.limits.budgets if b.tier is best.embedding)
        table = next(line for line in fixed if line.id == "embedding").bytes
        most = f"only {size(usable)}" if usable else "none"
        why = "experts gain more from it" if usable >= table else f"{most} of that may be used"
        lies, wished = TIER_NAMES[where.embedding], TIER_NAMES[best.embedding]
        sentences.append(f"The embedding ({size(table)}) lies in {lies}, not in {wished}: {why}.")
    if where.slots == total:
        return tuple(sentences)
    if where.staging is not best.staging:
        sentences.append("Experts go to their slots through pageable RAM, which is slower than page-locked.")
    whole = size(backend.slot_bytes(total))
    sentences.append(f"{where.slots:,} of {total:,} experts have a slot; all of them would take {whole}.")
    places = (
        (where.pinned, Tier.PINNED),
        (where.pageable, Tier.PAGEABLE),
        (total - where.pinned - where.pageable, Tier.FILE),
    )
    lie = [f"{count:,} in {TIER_NAMES[tier]}" for count, tier in places if count]
    sentences.append(f"When missed, experts are read as stored: {', '.join(lie)}.")
    return tuple(sentences)
