"""How fast a turn should have been by the plan's arithmetic, for its own length and its own misses."""

from __future__ import annotations

import msgspec

from strata.doctor.facts import Facts
from strata.doctor.plan import AllocationPlan, Tier
from strata.doctor.planner import backend_for, request_for
from strata.doctor.speed import Placement, Range, speed_of_turn
from strata.gguf.model_facts import ModelFacts


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt read and an answer written, by their counts."""

    start: int  # tokens that were there before the prompt and not read again
    prompt: int  # tokens
    answer: int  # decoded tokens
    prefill_misses: int
    decode_misses: int


def expected_of_turn(facts: Facts, model: ModelFacts, plan: AllocationPlan, turn: Turn) -> tuple[Range, Range]:
    """Return the ranges in which decoding and reading the prompt should lie, in tokens/s.

    The ranges that a plan shows are for a long prompt and a guessed hit rate; these are for what really was asked.
    """
    backend = backend_for(facts, model, plan.options)
    request = request_for(backend, model, plan.options)
    lies = {line.id: line.tier for line in plan.reservations}
    e = plan.experts
    placement = Placement(
        plan.chunk,
        lies.get("embedding", Tier.FILE),
        lies.get("staging_ring", Tier.PAGEABLE),
        e.slots,
        e.pinned,
        e.pageable,
    )
    reading = backend.traffic(request, max(turn.prompt, 1))
    _, prefill = speed_of_turn(
        reading, backend.speeds, placement, prefill_misses=turn.prefill_misses, misses_per_token=0.0
    )
    writing = backend.traffic(request, max(turn.start + turn.prompt + turn.answer // 2, 1))
    misses = turn.decode_misses / max(turn.answer, 1)
    decode, _ = speed_of_turn(writing, backend.speeds, placement, prefill_misses=0, misses_per_token=misses)
    return decode, prefill
