"""Whatever the plan says of slots, tiers and threads, the logits are the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from strata.doctor.plan import AllocationPlan, Tier
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.engine import Engine
from strata.runtime.expert_cache import CacheCounts
from strata.runtime.policies import FrequencyOverAge, LeastRecentlyUsed
from tests.tiny_model import TinyModel

from .plans import planned, reservation

MODELS = {
    "f32": TinyModel(),
    "q8_0 and q4_0": TinyModel(expert_type="Q8_0", down_type="Q4_0", dense_type="Q8_0"),
    "mixtral q4_1, tied": TinyModel(architecture="llama", expert_type="Q4_1", dense_type="Q5_0", tied=True),
}
EXPERTS = 48  # of all layers: 3 x 16, of which a token uses 6
MINIMUM, THIRTY_PERCENT = 2, 14
CHUNK = 8
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 96, 21)]
STEPS = [int(token) for token in np.random.default_rng(2).integers(0, 96, 24)]


@pytest.fixture(scope="module", params=list(MODELS))
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(MODELS[request.param].write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def plan_for(file: GGUFFile, slots: int, *, pinned: int = 0, pageable: int = 0, **options: Any) -> AllocationPlan:
    """The planner's plan, but with so many slots, and so many experts kept as stored in each tier."""
    plan = planned(file, max_context=64, prefill=CHUNK, **options)
    stored = read_model_facts(file).expert_classes[0].bytes
    lines = {line.id: line for line in plan.reservations if not line.id.startswith("experts_")}
    for line in (
        reservation("expert_slots", slots * plan.experts.slot_bytes, Tier.VRAM),
        reservation("staging_ring", stored),
        reservation("experts_pageable", pageable * stored),
        reservation("experts_pinned", pinned * stored, Tier.PINNED),
    ):
        lines[line.id] = line
    order = [Tier.VRAM, Tier.PAGEABLE, Tier.PINNED, Tier.FILE]
    used = sorted((line for line in lines.values() if line.bytes), key=lambda line: order.index(line.tier))
    experts = msgspec.structs.replace(
        plan.experts, slots=slots, pinned=pinned, pageable=pageable, file=EXPERTS - pinned - pageable
    )
    return msgspec.structs.replace(plan, experts=experts, reservations=tuple(used))


def logits_of(file: GGUFFile, plan: AllocationPlan, **load: Any) -> tuple[list[bytes], CacheCounts]:
    """Logits after the prompt and after each step, and what the cache did."""
    with Engine.load(file, plan, **load) as engine:
        answers = [engine.prefill(PROMPT).tobytes()]
        answers += [engine.decode(token).tobytes() for token in STEPS]
        assert engine.position == len(PROMPT) + len(STEPS)
        return answers, engine.expert_counts()


@pytest.fixture(scope="module")
def expected(file: GGUFFile) -> list[bytes]:
    answers, counts = logits_of(file, plan_for(file, EXPERTS, pinned=EXPERTS))
    assert counts.evictions == 0
    assert len(set(answers)) == len(answers)
    return answers


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FrequencyOverAge])
@pytest.mark.parametrize("slots", [1, MINIMUM, THIRTY_PERCENT, EXPERTS])
def test_the_same_bits_with_any_number_of_slots(
    file: GGUFFile, expected: list[bytes], slots: int, policy: type[LeastRecentlyUsed]
) -> None:
    answers, counts = logits_of(file, plan_for(file, slots), policy=policy)
    assert answers == expected
    layer_calls = 3 * (3 + len(STEPS))  # layers x (prompt chunks + steps)
    assert counts.calls == layer_calls
    if slots == EXPERTS:
        assert counts.misses <= EXPERTS
        assert (counts.evictions, counts.waves) == (0, layer_calls)
    else:
        assert counts.misses > EXPERTS
        assert counts.evictions == counts.misses - slots
    if slots < 8:
        assert counts.waves > layer_calls
    if slots >= THIRTY_PERCENT:
        assert counts.hits > 0


@pytest.mark.parametrize(
    ("pinned", "pageable"), [(EXPERTS, 0), (0, EXPERTS), (0, 0), (7, 20)], ids=["pinned", "pageable", "file", "mixed"]
)
def test_the_same_bits_from_every_tier(file: GGUFFile, expected: list[bytes], pinned: int, pageable: int) -> None:
    answers, counts = logits_of(file, plan_for(file, THIRTY_PERCENT, pinned=pinned, pageable=pageable))
    assert answers == expected
    held = {Tier.PINNED: pinned, Tier.PAGEABLE: pageable, Tier.FILE: EXPERTS - pinned - pageable}
    assert set(counts.filled_bytes) == {tier for tier, experts in held.items() if experts}
    stored = read_model_facts(file).expert_classes[0].bytes
    assert sum(counts.filled_bytes.values()) == counts.misses * stored


def test_the_same_bits_with_three_threads(
    file: GGUFFile, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.kernels.workers.WORTH_A_THREAD", 1)  # or so small a model would never wake one
    plan = planned(file, max_context=64, prefill=CHUNK, threads=3)
    assert plan.threads == 3
    assert logits_of(file, plan)[0] == expected


def test_the_same_bits_in_the_same_chunks_after_going_back_to_a_shared_prefix(
    file: GGUFFile, expected: list[bytes]
) -> None:
    with Engine.load(file, plan_for(file, THIRTY_PERCENT)) as engine:
        engine.prefill([*PROMPT[: 2 * CHUNK], 1, 2, 3])
        engine.decode(4)
        assert engine.resume(PROMPT) == 2 * CHUNK
        assert engine.prefill(PROMPT[2 * CHUNK :]).tobytes() == expected[0]
        assert [engine.decode(token).tobytes() for token in STEPS] == expected[1:]


def test_other_chunks_agree_closely(file: GGUFFile, expected: list[bytes]) -> None:
    plan = planned(file, max_context=64, prefill=3)
    assert plan.chunk == 3
    with Engine.load(file, plan) as engine:
        logits = engine.prefill(PROMPT)
        reference = np.frombuffer(expected[0], np.float32)
        assert np.linalg.norm(logits - reference) < 1e-5 * np.linalg.norm(reference)


def test_an_f16_kv_cache_is_close_and_not_the_same(file: GGUFFile, expected: list[bytes]) -> None:
    answers, _ = logits_of(file, plan_for(file, THIRTY_PERCENT, kv="f16"))
    reference = np.frombuffer(expected[-1], np.float32)
    error = np.linalg.norm(np.frombuffer(answers[-1], np.float32) - reference) / np.linalg.norm(reference)
    assert 0 < error < 5e-3


def test_a_dense_model_has_no_cache(tmp_path: Path) -> None:
    file = open_gguf(TinyModel(architecture="llama", experts=0, tied=True).write(tmp_path / "dense.gguf"))
    plan = planned(file, max_context=64, prefill=CHUNK)
    assert plan.line("expert_slots") is None
    answers, counts = logits_of(file, plan)
    assert counts == CacheCounts()
    assert counts.hit_rate is None
    assert len(answers) == 1 + len(STEPS)
