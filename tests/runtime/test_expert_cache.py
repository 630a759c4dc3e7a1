"""The cache changes where experts come from, never a bit of what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from strata.doctor.plan import ExpertCachePlan, Tier
from strata.gguf import footprint
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.kernels.dequant import dequantise
from strata.kernels.numpy_ops import NumpyOps
from strata.runtime.expert_cache import EMPTY, CacheCounts, ExpertCache
from strata.runtime.expert_store import ExpertStore, StoredExpert
from strata.runtime.memory import PlannedMemory
from strata.runtime.policies import EvictionPolicy, FrequencyOverAge, LeastRecentlyUsed
from strata.runtime.slots import HostSlots
from tests.tiny_model import TinyModel

from .plans import plan_of, reservation

LAYERS, EXPERTS, TOP_K, CHUNK = 2, 16, 2, 8
MODEL = TinyModel(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, expert_type="Q8_0", down_type="Q4_0")
TENSORS = {
    layer: (
        f"blk.{layer}.ffn_gate_exps.weight",
        f"blk.{layer}.ffn_up_exps.weight",
        f"blk.{layer}.ffn_down_exps.weight",
    )
    for layer in range(LAYERS)
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(MODEL.write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@contextmanager
def cache_of(
    file: GGUFFile, slots: int, policy: Callable[[int, int], EvictionPolicy] = LeastRecentlyUsed
) -> Iterator[ExpertCache]:
    facts = read_model_facts(file)
    slot = footprint.expert_slot_size(facts).bytes
    lines = plan_of(
        reservation("expert_slots", slots * slot, Tier.VRAM), reservation("staging_ring", facts.expert_classes[0].bytes)
    )
    none_held = ExpertCachePlan(total=LAYERS * EXPERTS, slots=slots, slot_bytes=slot, minimum_slots=1)
    arrays = {spec.name: np.zeros(spec.shape, "f4") for spec in footprint.workspace(facts, CHUNK, "f32", 2)}
    with PlannedMemory(lines) as memory:
        pool = HostSlots(memory, facts, slots)
        store = ExpertStore(file, TENSORS, EXPERTS, none_held, memory)
        ops, results = NumpyOps(arrays), arrays["results"]
        yield ExpertCache(store, pool, policy(LAYERS, EXPERTS), layers=LAYERS, ops=ops, results=results)


def calls(tokens: int, count: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Layer calls: (layer, hidden, ids), the layers in turn."""
    rng = np.random.default_rng(tokens)
    made = []
    for call in range(count):
        hidden = rng.standard_normal((tokens, MODEL.embedding), "f4")
        ids = np.array([rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(tokens)], "i4")
        made.append((call % LAYERS, hidden, ids))
    return made


def run(cache: ExpertCache, made: list[tuple[int, np.ndarray, np.ndarray]]) -> list[bytes]:
    answers = []
    for layer, hidden, ids in made:
        results = np.full((*ids.shape, MODEL.embedding), np.nan, "f4")
        cache.run(layer, hidden, ids, results)
        answers.append(results.tobytes())
    return answers


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FrequencyOverAge])
@pytest.mark.parametrize("slots", [1, TOP_K, 10, LAYERS * EXPERTS])
def test_any_number_of_slots_gives_the_same_bits(
    file: GGUFFile, slots: int, policy: Callable[[int, int], EvictionPolicy]
) -> None:
    made = calls(tokens=CHUNK, count=4) + calls(tokens=1, count=40)
    with cache_of(file, LAYERS * EXPERTS) as everything:
        expected = run(everything, made)
        assert everything.counts.evictions == 0
    with cache_of(file, slots, policy) as cache:
        assert run(cache, made) == expected
        counts = cache.counts
    assert counts.calls == len(made)
    assert counts.hits + counts.misses == sum(len(np.unique(ids)) for _, _, ids in made)
    assert counts.filled_bytes[Tier.FILE] == counts.misses * read_model_facts(file).expert_classes[0].bytes
    if slots < LAYERS * EXPERTS:
        assert counts.evictions == counts.misses - slots
        assert counts.waves > counts.calls
        assert counts.misses > LAYERS * EXPERTS
    if slots >= 10:
        assert counts.hits > 0


def test_the_answer_is_the_experts_formula(file: GGUFFile) -> None:
    (layer, hidden, ids) = calls(tokens=3, count=1)[0]
    results = np.empty((3, TOP_K, MODEL.embedding), "f4")
    with cache_of(file, 4) as cache:
        cache.run(layer, hidden, ids, results)

    def matrix(part: int, expert: int, out: int, into: int) -> np.ndarray:
        info, raw = file.tensors[TENSORS[layer][part]], file.raw(TENSORS[layer][part])
        weights = np.empty((EXPERTS, out, into), "f4")
        dequantise(raw, info.type.name, weights)
        return weights[expert].astype("f8")

    for token, rank in np.ndindex(ids.shape):
        expert, x = ids[token, rank], hidden[token].astype("f8")
        gate, up = (matrix(part, expert, MODEL.width, MODEL.embedding) @ x for part in (0, 1))
        expected = matrix(2, expert, MODEL.embedding, MODEL.width) @ (gate / (1 + np.exp(-gate)) * up)
        np.testing.assert_allclose(results[token, rank], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_call_that_fits_goes_in_one_wave_and_hits_stay(file: GGUFFile) -> None:
    ids = np.array([[3, 5]], "i4")
    with cache_of(file, 3) as cache:
        run(cache, [(0, np.ones((1, MODEL.embedding), "f4"), ids)])
        assert cache.counts == CacheCounts(calls=1, waves=1, misses=2, filled_bytes=cache.counts.filled_bytes)
        before = cache.counts.copy()
        run(
            cache, [(0, np.ones((1, MODEL.embedding), "f4"), np.array([[5, 7]], "i4"))]
        )  # 3 is the oldest, but a slot is free
        run(cache, [(0, np.ones((1, MODEL.embedding), "f4"), np.array([[3, 7]], "i4"))])
        since = cache.counts - before
    assert (since.calls, since.hits, since.misses, since.evictions) == (2, 3, 1, 0)
    assert since.hit_rate == 0.75


def test_a_call_never_evicts_what_its_own_wave_holds(file: GGUFFile) -> None:
    """The hit is worth less than the rest of the cache, yet must stay until its wave has run."""

    class Backwards(LeastRecentlyUsed):
        def worth(self, keys: np.ndarray) -> np.ndarray:
            return -super().worth(keys)

    made = calls(tokens=4, count=30)
    with cache_of(file, LAYERS * EXPERTS) as everything:
        expected = run(everything, made)
    with cache_of(file, 6, Backwards) as cache:
        assert run(cache, made) == expected
        assert cache.counts.hits > 0
        assert cache.counts.evictions > 0


@pytest.mark.parametrize("nth", range(1, 12))
def test_an_interrupted_fill_never_leaves_a_wrong_expert(
    file: GGUFFile, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(tokens=2, count=12)
    with cache_of(file, LAYERS * EXPERTS) as everything:
        expected = run(everything, made)
    with cache_of(file, 5) as cache:
        slots = cache._slots
        fill, fills = slots.fill, 0

        def interrupted(slot: int, layer: int, stored: StoredExpert) -> None:
            nonlocal fills
            fills += 1
            if fills == nth:
                slots.pool.down[slot] = np.nan  # half done
                raise KeyboardInterrupt
            fill(slot, layer, stored)

        monkeypatch.setattr(slots, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(cache, made)
        assert (cache._key_in != EMPTY).sum() == min(nth - 1, 4)  # the slot that was being filled is empty
        assert run(cache, made) == expected
        held = cache._key_in[cache._key_in != EMPTY]
        assert len(set(held.tolist())) == len(held)


def test_hits_run_before_their_slots_are_given_to_misses(file: GGUFFile) -> None:
    hidden = np.ones((2, MODEL.embedding), "f4")
    with cache_of(file, 2) as cache:
        run(cache, [(0, hidden[:1], np.array([[8, 9]], "i4")), (0, hidden, np.array([[1, 2], [8, 9]], "i4"))])
        counts = cache.counts
    assert (counts.hits, counts.misses, counts.waves) == (2, 4, 3)
    assert counts.filled_bytes[Tier.FILE] == 4 * read_model_facts(file).expert_classes[0].bytes


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FrequencyOverAge])
def test_ready_experts_lie_where_it_says(file: GGUFFile, policy: Callable[[int], EvictionPolicy]) -> None:
    """What a GPU uses in place of waves: all of a call's experts in slots at once, each with its own weights."""
    facts = read_model_facts(file)
    rng = np.random.default_rng(3)
    with cache_of(file, 5, policy) as cache:
        for call in range(30):
            layer = call % LAYERS
            experts = np.sort(rng.choice(EXPERTS, int(rng.integers(1, 6)), replace=False)).astype(np.intp)
            slots = cache.ready(layer, experts)
            assert len(set(slots.tolist())) == len(experts)
            down = np.empty((EXPERTS, facts.embedding, facts.expert_width), "f4")
            dequantise(file.raw(TENSORS[layer][2]), "Q4_0", down)
            for expert, slot in zip(experts, slots, strict=True):
                np.testing.assert_array_equal(cache._pool.down[slot], down[expert])
        counts = cache.counts
        assert counts.calls == counts.waves == 30
        assert counts.hits > 0
        assert counts.misses > EXPERTS
        assert cache.seen.sum() <= LAYERS * EXPERTS
