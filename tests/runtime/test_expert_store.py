"""The store gives the same bytes from every tier, and counts them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from strata.doctor.plan import ExpertCachePlan, Tier
from strata.errors import PlanViolation
from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.expert_store import ExpertStore
from strata.runtime.memory import PlannedMemory
from tests.tiny_model import TinyModel

from .plans import plan_of, reservation

MODEL = TinyModel(layers=2, experts=8, expert_type="Q8_0", down_type="Q4_0")
EXPERT_BYTES = 2 * (64 * 32 // 32 * 34) + 64 * 32 // 32 * 18
TENSORS = {
    layer: (
        f"blk.{layer}.ffn_gate_exps.weight",
        f"blk.{layer}.ffn_up_exps.weight",
        f"blk.{layer}.ffn_down_exps.weight",
    )
    for layer in range(2)
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(MODEL.write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def memory_for(pinned: int, pageable: int, ring: int) -> PlannedMemory:
    return PlannedMemory(
        plan_of(
            reservation("experts_pageable", pageable * EXPERT_BYTES),
            reservation("staging_ring", ring * EXPERT_BYTES, Tier.PINNED),
            reservation("experts_pinned", pinned * EXPERT_BYTES, Tier.PINNED),
        )
    )


def cache_plan(pinned: int, pageable: int) -> ExpertCachePlan:
    return ExpertCachePlan(
        total=16, slots=1, slot_bytes=0, minimum_slots=1, pinned=pinned, pageable=pageable, file=16 - pinned - pageable
    )


def stored(file: GGUFFile, layer: int, expert: int) -> list[bytes]:
    parts = []
    for name in TENSORS[layer]:
        raw = file.raw(name)
        nbytes = len(raw) // 8
        parts.append(raw[expert * nbytes : (expert + 1) * nbytes].tobytes())
    return parts


@pytest.mark.parametrize(
    ("pinned", "pageable", "ring"),
    [(16, 0, 0), (0, 16, 1), (0, 0, 1), (3, 5, 2)],
    ids=["pinned", "pageable", "file", "mixed"],
)
def test_every_tier_gives_the_same_bytes_and_counts_them(file: GGUFFile, pinned: int, pageable: int, ring: int) -> None:
    with memory_for(pinned, pageable, ring) as memory:
        store = ExpertStore(file, TENSORS, 8, cache_plan(pinned, pageable), memory)
        done: list[int] = []
        store.load(done.append)
        assert sum(done) == store.held_bytes == (pinned + pageable) * EXPERT_BYTES
        tiers: Counter[Tier] = Counter()
        for layer in range(2):
            for expert in range(8):
                parts, tier = store.fetch(layer, expert)
                assert [part.tobytes() for part in parts] == stored(file, layer, expert)
                tiers[tier] += 1
    assert tiers == Counter({Tier.PINNED: pinned, Tier.PAGEABLE: pageable, Tier.FILE: 16 - pinned - pageable})
    assert store.fetched_bytes == Counter({tier: count * EXPERT_BYTES for tier, count in tiers.items()})


def test_the_hottest_experts_are_pinned_and_the_next_pageable(file: GGUFFile) -> None:
    hottest = [13, 2, 7, *(key for key in range(16) if key not in (13, 2, 7))]
    with memory_for(2, 1, 1) as memory:
        store = ExpertStore(file, TENSORS, 8, cache_plan(2, 1), memory, hottest=hottest)
        store.load(lambda nbytes: None)
        tiers = {key: store.fetch(*divmod(key, 8))[1] for key in range(16)}
    assert {key for key, tier in tiers.items() if tier is Tier.PINNED} == {13, 2}
    assert {key for key, tier in tiers.items() if tier is Tier.PAGEABLE} == {7}


def test_a_ring_of_two_holds_the_last_two_fetches(file: GGUFFile) -> None:
    with memory_for(0, 0, 2) as memory:
        store = ExpertStore(file, TENSORS, 8, cache_plan(0, 0), memory)
        (one, _), (two, _) = store.fetch(0, 1), store.fetch(1, 2)
        assert [part.tobytes() for part in one] == stored(file, 0, 1)
        assert [part.tobytes() for part in two] == stored(file, 1, 2)
        assert not np.shares_memory(one.gate, two.gate)


def test_more_experts_than_the_line_holds_is_a_violation(file: GGUFFile) -> None:
    with memory_for(2, 0, 1) as memory, pytest.raises(PlanViolation, match='"experts_pinned": '):
        ExpertStore(file, TENSORS, 8, cache_plan(3, 0), memory)
