"""Cells by the plan, and which tokens they hold."""

from __future__ import annotations

import numpy as np
import pytest

from strata.doctor.plan import Tier
from strata.errors import PlanViolation
from strata.gguf.footprint import BufferSpec
from strata.runtime.kv_cache import KvCache
from strata.runtime.memory import PlannedMemory

from .plans import plan_of, reservation

HEADS = (2, 1)
CELL_VALUES = sum(HEADS) * (16 + 8)


def specs(capacity: int, kv: str) -> list[tuple[BufferSpec, BufferSpec]]:
    return [
        (BufferSpec(f"keys.{i}", (capacity, g, 16), kv), BufferSpec(f"values.{i}", (capacity, g, 8), kv))
        for i, g in enumerate(HEADS)
    ]


@pytest.mark.parametrize(("kv", "size"), [("f16", 2), ("f32", 4)])
def test_cells_take_what_the_plan_says_and_no_more(kv: str, size: int) -> None:
    with PlannedMemory(plan_of(reservation("kv_cache", 32 * CELL_VALUES * size, Tier.VRAM))) as memory:
        cache = KvCache(memory, specs(32, kv), capacity=32)
        assert memory.left("kv_cache") == 0
        assert [(layer.keys.shape, layer.values.shape) for layer in cache.layers] == [
            ((32, 2, 16), (32, 2, 8)),
            ((32, 1, 16), (32, 1, 8)),
        ]
        assert {layer.keys.dtype for layer in cache.layers} == {np.dtype(f"f{size}")}
        assert (cache.length, cache.left) == (0, 32)


def test_one_position_more_than_planned_is_a_violation() -> None:
    lines = plan_of(reservation("kv_cache", 32 * CELL_VALUES * 2, Tier.VRAM))
    with PlannedMemory(lines) as memory, pytest.raises(PlanViolation, match=r"values\.1"):
        KvCache(memory, specs(33, "f16"), capacity=33)


@pytest.mark.parametrize(
    ("held", "asked", "shared"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 5, 3], 1), ([1], [2], 0)],
)
def test_a_shared_prefix_is_kept(held: list[int], asked: list[int], shared: int) -> None:
    with PlannedMemory(plan_of(reservation("kv_cache", 8 * CELL_VALUES * 4, Tier.VRAM))) as memory:
        cache = KvCache(memory, specs(8, "f32"), capacity=8)
        cache.tokens.extend(held)
        assert cache.shared_prefix(asked) == shared
        cache.truncate(shared)
        assert cache.tokens == asked[:shared]
        assert cache.left == 8 - shared
