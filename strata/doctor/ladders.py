"""What a plan gave up, in words: one sentence for every step down a ladder."""

from __future__ import annotations

from strata.doctor.candidates import Backend, Candidate
from strata.doctor.request import Request
from strata.doctor.units import size


def given_up(backend: Backend, request: Request, chosen: Candidate) -> tuple[str, ...]:
    """Return a sentence for everything that a larger memory would have made better."""
    where, sentences = chosen.placement, []
    total = backend.experts.total
    if where.slots < total and request.slots is None:
        sentences.append(
            f"{where.slots:,} of {total:,} experts have a slot; all of them would take {size(backend.slot_bytes(total))}."
        )
    return tuple(sentences)
