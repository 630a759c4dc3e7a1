"""Dequantisation against blocks whose values other programs agreed on, to the bit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from strata.errors import UnsupportedModel
from strata.gguf.footprint import DEQUANTISE_TEMPORARY_BYTES
from strata.gguf.types import TensorType
from strata.kernels.dequant import BLOCK_ELEMENTS, can_dequantise, dequantise, row_bytes
from tests.resident import GOLDEN

ROWS = np.load(GOLDEN / "quants.npz")
BITS = np.load(GOLDEN / "quants_bits.npz")
READABLE = [kind.name for kind in TensorType if can_dequantise(kind.name)]


@pytest.mark.parametrize("kind", [name.removesuffix("_raw") for name in ROWS.files if name.endswith("_raw")])
def test_rows_to_the_bit(kind: str) -> None:
    out = np.full(ROWS[f"{kind}_f32"].shape, 77, np.float32)
    dequantise(ROWS[f"{kind}_raw"], kind, out)
    np.testing.assert_array_equal(out.view(np.uint32), ROWS[f"{kind}_f32"].view(np.uint32))


@pytest.mark.parametrize("kind", [name.removesuffix("_raw") for name in BITS.files if name.endswith("_raw")])
def test_random_blocks_to_the_bit(kind: str) -> None:
    out = np.full(BITS[f"{kind}_f32"].shape, 77, np.float32)
    dequantise(BITS[f"{kind}_raw"], kind, out)
    np.testing.assert_array_equal(out.view(np.uint32), BITS[f"{kind}_f32"].view(np.uint32))


@pytest.mark.parametrize("kind", READABLE)
def test_pieces_join_and_temporaries_stay_below_what_is_charged(kind: str) -> None:
    """Longer than two pieces: equal to single blocks, and within the bytes the planner sets aside."""
    elements = 2 * BLOCK_ELEMENTS + 512
    some = np.random.default_rng(1).integers(0, 60, row_bytes(kind, 512), np.uint8)
    raw = np.tile(some, elements // 512)
    expected, out = np.empty(512, np.float32), np.empty(elements, np.float32)
    dequantise(some, kind, expected)
    tracemalloc.start()
    dequantise(raw, kind, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(out.reshape(-1, 512), np.broadcast_to(expected, (elements // 512, 512)))
    assert peak <= DEQUANTISE_TEMPORARY_BYTES


def test_block_sizes_agree_with_the_header_reader() -> None:
    for kind in READABLE:
        tensor_type = TensorType[kind]
        assert row_bytes(kind, tensor_type.block_elements) == tensor_type.block_bytes


def test_float32_is_copied() -> None:
    values = np.array([[1.5, -0.0, np.inf]], np.float32)
    out = np.zeros((1, 3), np.float32)
    dequantise(values.view(np.uint8), "F32", out)
    np.testing.assert_array_equal(out.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("kind", ["Q8_1", "I32", "NOT_A_TYPE"])
def test_what_cannot_be_read_is_refused(kind: str) -> None:
    assert not can_dequantise(kind)
    with pytest.raises(UnsupportedModel, match=kind):
        dequantise(np.zeros(40, np.uint8), kind, np.zeros(32, np.float32))


def test_bytes_and_values_must_fit() -> None:
    with pytest.raises(ValueError, match="34 bytes of Q8_0 do not hold 64 values"):
        dequantise(np.zeros(34, np.uint8), "Q8_0", np.zeros(64, np.float32))
