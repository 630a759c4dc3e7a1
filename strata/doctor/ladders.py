"""What a plan gave up, in words: one sentence for every step down a ladder."""

from __future__ import annotations

from strata.doctor.candidates import Backend, Candidate
from strata.doctor.request import Request
from strata.doctor.units import size


def given_up(backend: Backend, request: Request, chosen: Candidate) -> tuple[str, ...]:
    """Return a sentence for everything that a larger memory would have made better."""
    where, total = chosen.placement, backend.experts.total
    sentences = []
    if where.chunk < request.chunks[0]:
        sentences.append(
            f"Prompts are read {where.chunk} tokens at a time instead of {request.chunks[0]}: "
            "a larger workspace would have cost more than it gains."
        )
    if where.embedding is not backend.embedding_tiers[0]:
        sentences.append(f"The embedding lies in {TIER_NAMES[where.embedding]}: a row is read for each token.")
    if where.slots < total:
        whole = size(backend.slot_bytes(total))
        sentences.append(f"{where.slots:,} of {total:,} experts have a slot; all of them would take {whole}.")
        in_file = total - where.pinned - where.pageable
        if in_file:
            sentences.append(f"{in_file:,} experts are read from the model file whenever they are missed.")
    return tuple(sentences)
