"""The int8 KV cache against its definition, written another way."""

from __future__ import annotations

import numpy as np
import pytest

from strata.gguf import footprint
from strata.kernels.kv_int8 import GROUP, dequantise_cells, quantise, scales_of
from strata.kernels.numpy_ops import NumpyOps
from strata.kernels.ops import KvLayer, Rope, RopeStyle
from tests.kernels.test_numpy_ops import facts
from tests.resident import make_workspace


def kept(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, scales = np.full(x.shape, 77, np.int8), np.full((*x.shape[:2], scales_of(x.shape[2])), 77, np.float16)
    quantise(x.copy(), codes, scales)
    out = np.full(x.shape, np.nan, np.float32)
    dequantise_cells(codes, scales, out)
    return codes, scales, out


@pytest.mark.parametrize("columns", [1, 16, 64, 96, 128, 256])
@pytest.mark.parametrize("size", [0.5, 1.0, 3e4])
def test_values_are_off_by_half_a_scale_at_most(columns: int, size: float) -> None:
    x = (np.random.default_rng(columns).standard_normal((7, 3, columns)) * size).astype(np.float32)
    codes, scales, out = kept(x)
    assert np.abs(codes.astype(int)).max() == 127
    for start in range(0, columns, GROUP):
        group = np.s_[..., start : start + GROUP]
        scale = scales[..., start // GROUP, None]
        np.testing.assert_array_equal(
            scale, (np.abs(x[group]).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
        )
        wide = scale.astype(np.float64)
        np.testing.assert_array_equal(codes[group], np.clip(np.rint(x[group].astype(np.float64) / wide), -127, 127))
        assert (np.abs(out[group] - x[group]) <= wide * (0.5 + 127 * 2.0**-11)).all()
        inside = np.abs(codes[group]) < 127
        assert (np.abs(out[group] - x[group]) <= wide * 0.5001)[inside].all()


def test_zeros_and_what_is_too_small_for_a_scale_are_zeros() -> None:
    x = np.zeros((1, 2, 64), np.float32)
    x[0, 1] = 1e-7
    codes, scales, out = kept(x)
    assert not codes.any()
    assert not scales.any()
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_spoils_its_group_and_no_other(bad: float) -> None:
    x = np.ones((1, 1, 128), np.float32)
    x[0, 0, 70] = bad
    out = kept(x)[2]
    assert not np.isfinite(out[0, 0, 64:]).all()
    assert not np.isfinite(out[0, 0, 70])
    assert np.abs(out[0, 0, :64] - 1).max() < 5e-4  # an f16 scale's error


def test_new_tokens_are_appended_in_their_cells_alone() -> None:
    rng = np.random.default_rng(0)
    ops = NumpyOps(make_workspace(facts(heads=2, kv_heads=(2,), key_length=96, value_length=64), 3, "int8"))
    kv = KvLayer(
        *(np.full((9, 2, n), 77, np.int8) for n in (96, 64)),
        *(np.full((9, 2, scales_of(n)), 77, np.float16) for n in (96, 64)),
    )
    q, k, v = (rng.standard_normal((3, 2, n)).astype(np.float32) for n in (96, 96, 64))
    still = Rope(RopeStyle.NEOX, 96, np.zeros(48, np.float32))  # turns nothing
    expected = [each for x in (k, v) for each in kept(x)[:2]]
    ops.rope_append(q, k, v.copy(), None, 1e-6, still, 4, kv)
    for cells, new in zip((kv.keys, kv.key_scales, kv.values, kv.value_scales), expected, strict=True):
        np.testing.assert_array_equal(cells[4:7], new)
        assert (cells[:4] == 77).all()
        assert (cells[7:] == 77).all()


def test_the_planner_counts_the_same_groups() -> None:
    assert footprint.KV_GROUP == GROUP
    assert all(footprint.kv_scales(n) == scales_of(n) for n in range(1, 600))
