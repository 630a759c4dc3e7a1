"""The tables: every expert that is asked for lies in its slot, and the least worth leaves, as on the CPU's cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.doctor.plan import Tier
from strata.kernels.numpy_residency import make_ready
from strata.kernels.residency import EMPTY, Policy
from strata.runtime.expert_cache import ExpertResidency
from strata.runtime.policies import FrequencyOverAge, LeastRecentlyUsed

from .residencies import EXPERTS, LAYERS, NBYTES, STRIDE, TOP_K, calls, pool, tables

KEYS = LAYERS * EXPERTS
STORED = np.random.default_rng(0).integers(0, 256, (KEYS, NBYTES), dtype=np.uint8)
ALL = 1 + np.arange(KEYS, dtype=np.uint64)  # "addresses"


def read(address: int, nbytes: int) -> np.ndarray:
    assert nbytes == NBYTES
    return STORED[address - 1]


@given(st.sampled_from(Policy), st.integers(0, 2**32), st.integers(1, 4), st.integers(0, KEYS), st.floats(0, 1))
def test_what_is_asked_for_lies_in_its_slot(policy: Policy, seed: int, tokens: int, more: int, readable: float) -> None:
    rng = np.random.default_rng(seed)
    sources = np.where(rng.random(KEYS) < readable, ALL, np.uint64(0))
    slots = min(EXPERTS, tokens * TOP_K) + more
    t, p = tables(policy, sources, rng.integers(0, 99, KEYS)), pool(slots)
    hits = misses = evictions = 0
    for layer, ids in calls(seed, 40, tokens):
        before = t.slot_of.copy()
        where = np.zeros_like(ids)
        make_ready(t, p, layer, ids, where, read)
        keys = np.unique(layer * EXPERTS + ids)
        missing = keys[before[keys] == EMPTY]
        hits, misses = hits + len(keys) - len(missing), misses + len(missing)
        evictions += int(np.count_nonzero((before != EMPTY) & (t.slot_of == EMPTY)))
        np.testing.assert_array_equal(where, t.slot_of[layer * EXPERTS + ids])
        held = np.flatnonzero(t.slot_of != EMPTY)
        np.testing.assert_array_equal(p.owner[t.slot_of[held]], held)
        assert len(held) == np.count_nonzero(p.owner != EMPTY) == min(misses, len(held))
        wanted = dict(t.wanted[1 : 1 + 2 * t.wanted[0]].reshape(-1, 2).tolist())
        assert set(wanted) == {key for key in missing.tolist() if not sources[key]}
        for key, slot in wanted.items():  # what the host does
            assert t.slot_of[key] == slot
            p.data[slot * STRIDE : slot * STRIDE + NBYTES] = STORED[key]
        for key, slot in zip((layer * EXPERTS + ids).ravel(), where.ravel(), strict=True):
            np.testing.assert_array_equal(p.data[slot * STRIDE : slot * STRIDE + NBYTES], STORED[key])
    assert t.counts[:3].tolist() == [hits, misses, evictions]
    if readable == 1:
        assert t.counts[3] == misses * NBYTES


@pytest.mark.parametrize(
    ("policy", "of_the_cpu"),
    [(Policy.RECENCY, LeastRecentlyUsed), (Policy.FREQUENCY_OVER_AGE, FrequencyOverAge)],
)
@given(seed=st.integers(0, 2**32), slots=st.integers(TOP_K, KEYS))
def test_the_same_leave_as_on_the_cpu(
    policy: Policy, of_the_cpu: type[LeastRecentlyUsed], seed: int, slots: int
) -> None:
    stored = SimpleNamespace(gate=STORED[0])

    class Store:
        experts = EXPERTS

        def fetch(self, layer: int, expert: int) -> Any:
            return (stored.gate,), Tier.PINNED

    filled: list[tuple[int, int]] = []
    places = SimpleNamespace(count=slots, fill=lambda slot, layer, given: filled.append((slot, layer)))
    cpu = ExpertResidency(Store(), places, of_the_cpu(LAYERS, EXPERTS), layers=LAYERS)  # type: ignore[arg-type]
    t, p = tables(policy, ALL, None), pool(slots)
    for layer, ids in calls(seed, 60, tokens=1):
        where = np.zeros_like(ids)
        make_ready(t, p, layer, ids, where, read)
        np.testing.assert_array_equal(where[0], cpu.ready(layer, ids[0].astype(np.intp)))
    assert t.counts.tolist() == [cpu.counts.hits, cpu.counts.misses, cpu.counts.evictions, len(filled) * NBYTES]


def test_a_profile_keeps_its_favourites() -> None:
    uses = np.tile(np.arange(EXPERTS), LAYERS)
    t, p = tables(Policy.PROFILE, ALL, uses), pool(TOP_K)
    favourites = np.array([[15, 14, 13, 12]], np.int32)
    others = np.array([[0, 1, 2, 15]], np.int32)
    slots = np.zeros((1, TOP_K), np.int32)
    make_ready(t, p, 0, favourites, slots, read)
    make_ready(t, p, 0, others, slots, read)
    assert set(p.owner.tolist()) == {0, 1, 2, 15}
    make_ready(t, p, 0, favourites[:, :1], slots[:, :1], read)
    make_ready(t, p, 0, favourites[:, 1:2], slots[:, 1:2], read)
    assert set(p.owner.tolist()) == {14, 1, 2, 15}
    np.testing.assert_array_equal(t.use[:EXPERTS, 1], uses[:EXPERTS])
