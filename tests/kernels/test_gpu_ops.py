"""Every op on the device against float64, on random inputs of odd shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from gguf import GGMLQuantizationType  # noqa: E402
from gguf.quants import dequantize  # noqa: E402

from strata.kernels.cuda_layout import LAYOUTS, partial_size, row_bytes  # noqa: E402
from strata.kernels.cuda_ops import CudaOps, CudaSlots, CudaWeight  # noqa: E402
from strata.kernels.ops import KvLayer, Rope, RopeStyle  # noqa: E402

TOLERANCE = 1e-5  # relative, of float32 sums in another order
RNG = np.random.default_rng(11)
_SCALE_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALE_AT |= {"IQ3_S": (0,), "IQ4_XS": (0,)}


def error(found: Any, expected: np.ndarray) -> float:
    """Return the relative error; NaN never passes a comparison."""
    found = cupy.asnumpy(found).astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def raw_matrix(type_: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random matrix as a file holds it, uint8, and as float64."""
    layout = LAYOUTS[type_]
    if type_ == "F32":
        values = floats(rows, columns)
        return values.view(np.uint8), values.astype(np.float64)
    if type_ in ("F16", "BF16"):
        bits = floats(rows, columns).astype(np.float16).view(np.uint16)
        if type_ == "BF16":
            bits = (floats(rows, columns).view(np.uint32) >> 16).astype(np.uint16)
        raw = bits.view(np.uint8)
    else:
        blocks = RNG.integers(0, 256, (rows, columns // layout.columns, layout.nbytes), dtype=np.uint8)
        for at in _SCALE_AT.get(type_, ()):
            scale = RNG.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        if type_ == "MXFP4":
            blocks[..., 0] = RNG.integers(118, 124, blocks.shape[:2])
        raw = blocks.reshape(rows, -1)
    return raw, dequantize(raw, GGMLQuantizationType[type_]).astype(np.float64)


def on_device(ops: CudaOps, raw: np.ndarray, type_: str) -> Any:
    data, source = cupy.empty(raw.size, cupy.uint8), cupy.asarray(np.ascontiguousarray(raw).ravel())
    ops.to_planes(source.data.ptr, data, type_)
    return data


def matrix(ops: CudaOps, type_: str, rows: int, columns: int) -> tuple[CudaWeight, np.ndarray]:
    raw, values = raw_matrix(type_, rows, columns)
    return CudaWeight(on_device(ops, raw, type_), type_, rows, columns), values


def rms(x: np.ndarray, norm: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm


def unwritten(*shape: int) -> Any:
    return cupy.full(shape, cupy.nan, cupy.float32)


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("type_", LAYOUTS)
def test_norm_project(type_: str, tokens: int) -> None:
    ops, columns = CudaOps({}), 1280
    x, norm = floats(tokens, columns), floats(columns)
    pairs = [matrix(ops, type_, 301, columns), matrix(ops, "Q6_K", 77, columns), matrix(ops, type_, 5, columns)]
    outs = [unwritten(tokens, weight.rows) for weight, _ in pairs]
    ops.norm_project(cupy.asarray(x), cupy.asarray(norm), 1e-6, [weight for weight, _ in pairs], outs)
    for (_, values), out in zip(pairs, outs, strict=True):
        assert error(out, rms(x, norm) @ values.T) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("type_", ["F32", "Q8_0", "Q4_K"])
def test_norm_project_with_biases(type_: str, tokens: int) -> None:
    ops, columns = CudaOps({}), 1280
    x, norm = floats(tokens, columns), floats(columns)
    pairs = [matrix(ops, type_, 301, columns), matrix(ops, "Q6_K", 77, columns), matrix(ops, type_, 5, columns)]
    biases = [floats(weight.rows) for weight, _ in pairs]
    outs = [unwritten(tokens, weight.rows) for weight, _ in pairs]
    weights, given = [weight for weight, _ in pairs], [cupy.asarray(bias) for bias in biases]
    ops.norm_project(cupy.asarray(x), cupy.asarray(norm), 1e-6, weights, outs, given)
    for (_, values), bias, out in zip(pairs, biases, outs, strict=True):
        assert error(out, rms(x, norm) @ values.T + bias) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("widths", [(2048, 2048), (128, 64), (3584,), (96, 100)])
def test_norm_rows(widths: tuple[int, ...], tokens: int) -> None:
    rows, norms = [floats(tokens, width) for width in widths], [floats(width) for width in widths]
    given = [cupy.asarray(row) for row in rows]
    CudaOps({}).norm_rows(given, [cupy.asarray(norm) for norm in norms], 1e-6)
    for out, row, norm in zip(given, rows, norms, strict=True):
        assert error(out, rms(row, norm)) < TOLERANCE


@pytest.mark.parametrize("scale", [0.22, 12.0])
def test_scales(scale: float) -> None:
    ops, columns = CudaOps({"logits": unwritten(3, 8), "counters": cupy.zeros(1, cupy.uint32)}), 256
    x, norm, before = floats(3, columns), floats(columns), floats(3, 130)
    weight, values = matrix(ops, "Q4_K", 130, columns)
    out = unwritten(3, columns)
    ops.embed(weight, cupy.asarray([7, 129, 7], cupy.int32), out, scale=scale)
    assert error(out, scale * values[[7, 129, 7]]) < TOLERANCE
    residual, logits = cupy.asarray(before), unwritten(3, 130)
    ops.project_add(cupy.asarray(x), weight, residual, scale=scale)
    assert error(residual, before + scale * (x @ values.T)) < TOLERANCE
    ops.head(cupy.asarray(x), cupy.asarray(norm), 1e-6, weight, logits, scale=scale)
    assert error(logits, scale * (rms(x, norm) @ values.T)) < TOLERANCE
    router, _ = matrix(ops, "F32", 8, columns)
    ids, weights = cupy.zeros((3, 2), cupy.int32), unwritten(3, 2)
    arguments = (cupy.asarray(x), cupy.asarray(norm), 1e-6, router, True, unwritten(3, columns), ids, weights)
    ops.route(*arguments, scale=scale)
    assert error(weights.sum(axis=1), np.full(3, scale)) < TOLERANCE


@pytest.mark.parametrize(
    ("type_", "down_type", "columns", "width"),
    [("Q4_K", "Q6_K", 2048, 5632), ("F32", "F32", 64, 48), ("Q8_0", "Q5_K", 512, 256)],
)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("tokens", [1, 5])
def test_shared_ffn(type_: str, down_type: str, columns: int, width: int, shares: bool, tokens: int) -> None:
    ops = CudaOps({name: unwritten(tokens, width) for name in ("gate", "up")} | {"share": unwritten(tokens)})
    hidden, before, share = floats(tokens, columns), floats(tokens, columns), floats(columns) / columns**0.5
    (gate, gates), (up, ups) = (matrix(ops, type_, width, columns) for _ in range(2))
    down, downs = matrix(ops, down_type, columns, width)
    residual = cupy.asarray(before)
    given = cupy.asarray(share) if shares else None
    ops.shared_ffn(cupy.asarray(hidden), given, gate, up, down, residual, scale=0.3)
    h = hidden.astype(np.float64)
    a = h @ gates.T
    factor = 1 / (1 + np.exp(-(h @ share)))[:, None] if shares else 1.0
    assert error(residual, before + 0.3 * factor * ((a / (1 + np.exp(-a)) * (h @ ups.T)) @ downs.T)) < TOLERANCE


@pytest.mark.parametrize(
    ("type_", "columns"), [("F32", 64), ("F32", 2880), ("Q8_0", 96), ("Q4_K", 256), ("Q4_K", 8192)]
)
def test_project_add(type_: str, columns: int) -> None:
    ops = CudaOps({})
    x, before = floats(2, columns), floats(2, 130)
    weight, values = matrix(ops, type_, 130, columns)
    residual = cupy.asarray(before)
    ops.project_add(cupy.asarray(x), weight, residual)
    assert error(residual, before + x @ values.T) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5])
def test_dense_ffn(tokens: int) -> None:
    columns, width = 576, 1536
    ops = CudaOps({name: unwritten(tokens, width) for name in ("gate", "up")})
    x, norm = floats(tokens, columns), floats(columns)
    (gate, gates), (up, ups) = (matrix(ops, "Q8_0", width, columns) for _ in range(2))
    down, downs = matrix(ops, "Q5_K", columns, width)
    residual = cupy.asarray(x)
    ops.dense_ffn(residual, cupy.asarray(norm), 1e-6, gate, up, down)
    a = rms(x, norm) @ gates.T
    assert error(residual, x + (a / (1 + np.exp(-a)) * (rms(x, norm) @ ups.T)) @ downs.T) < TOLERANCE


def test_large_head_is_walked_whole() -> None:
    ops = CudaOps({})
    x, norm = floats(1, 256), floats(256)
    weight, values = matrix(ops, "Q6_K", 70001, 256)
    out = unwritten(1, weight.rows)
    ops.head(cupy.asarray(x), cupy.asarray(norm), 1e-6, weight, out)
    assert error(out, rms(x, norm) @ values.T) < TOLERANCE


def rotate(x: np.ndarray, position: int, dims: int, style: RopeStyle, inverse: np.ndarray) -> np.ndarray:
    angle = (np.arange(position, position + len(x), dtype=np.float32)[:, None] * inverse).astype(np.float64)[:, None]
    out = x.copy()
    half = dims // 2
    a, b = (slice(0, half), slice(half, dims)) if style is RopeStyle.NEOX else (slice(0, dims, 2), slice(1, dims, 2))
    out[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    out[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
    return out


@pytest.mark.parametrize("position", [0, 30, 31, 500, 9000, 100_000])
@pytest.mark.parametrize("tokens", [1, 2, 8, 11])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "dims", "style", "normed", "dtype"),
    [
        (32, 4, 128, 128, RopeStyle.NEOX, True, "float16"),
        (6, 2, 32, 32, RopeStyle.NORM, False, "float32"),
        (16, 1, 64, 32, RopeStyle.NEOX, True, "float16"),
        (8, 1, 256, 64, RopeStyle.NORM, True, "float32"),
    ],
)
def test_attention(
    heads: int,
    groups: int,
    size: int,
    dims: int,
    style: RopeStyle,
    normed: bool,
    dtype: str,
    tokens: int,
    position: int,
) -> None:
    scratch = {
        "partial": unwritten(partial_size(tokens, heads, size)),
        "counters": cupy.zeros(tokens * heads, cupy.uint32),
    }
    ops = CudaOps(scratch)
    q, k, v = floats(tokens, heads, size), floats(tokens, groups, size), floats(tokens, groups, size)
    norms = (floats(size), floats(size)) if normed else None
    inverse = (1e6 ** (-np.arange(0, dims, 2) / dims)).astype(np.float32)
    keys, values = (floats(position + tokens + 2, groups, size).astype(dtype) for _ in range(2))
    kv, out = KvLayer(cupy.asarray(keys), cupy.asarray(values)), unwritten(tokens, heads, size)
    device_norms = None if norms is None else tuple(map(cupy.asarray, norms))
    rope = Rope(style, dims, cupy.asarray(inverse))
    for _ in range(2):  # the second time the counters are the first one's
        q_k_v = [cupy.asarray(each) for each in (q, k, v)]
        at = cupy.asarray([position], cupy.int32)
        ops.attention(*q_k_v, device_norms, 1e-6, rope, at, kv, size**-0.5, out)
    normed_q, normed_k = (q, k) if norms is None else (rms(q, norms[0]), rms(k, norms[1]))
    rotated_q = rotate(normed_q.astype(np.float64), position, dims, style, inverse)
    rotated_k = rotate(normed_k.astype(np.float64), position, dims, style, inverse)
    new, half = slice(position, position + tokens), dtype == "float16"
    assert error(kv.keys[new], rotated_k) < (4e-4 if half else 1e-6)
    np.testing.assert_array_equal(cupy.asnumpy(kv.values[new]), v.astype(dtype))
    for cells, before in ((kv.keys, keys), (kv.values, values)):
        np.testing.assert_array_equal(cupy.asnumpy(cells[:position]), before[:position])
        np.testing.assert_array_equal(cupy.asnumpy(cells[position + tokens :]), before[position + tokens :])
    keys, values = cupy.asnumpy(kv.keys).astype(np.float64), cupy.asnumpy(kv.values).astype(np.float64)
    expected = np.empty(q.shape)
    for t in range(tokens):
        for h in range(heads):
            cells, g = position + t + 1, h * groups // heads
            scores = keys[:cells, g] @ rotated_q[t, h] * size**-0.5
            p = np.exp(scores - scores.max())
            expected[t, h] = p @ values[:cells, g] / p.sum()
    assert error(out, expected) < TOLERANCE


@pytest.mark.parametrize(("experts", "top_k", "columns"), [(128, 8, 2048), (8, 2, 128), (60, 4, 256), (512, 10, 512)])
@pytest.mark.parametrize("tokens", [1, 6])
def test_route(experts: int, top_k: int, columns: int, tokens: int) -> None:
    ops = CudaOps({"logits": unwritten(tokens, experts), "counters": cupy.zeros(1, cupy.uint32)})
    x, norm = floats(tokens, columns), floats(columns)
    router, values = matrix(ops, "F32", experts, columns)
    slot_of = RNG.permutation(experts).astype(np.int32)
    hidden, weights = unwritten(tokens, columns), unwritten(tokens, top_k)
    ids, slots = (cupy.full((tokens, top_k), -1, cupy.int32) for _ in range(2))
    for normalise in (True, False):
        ops.route(
            *(cupy.asarray(x), cupy.asarray(norm), 1e-6, router, normalise, hidden, ids, weights, slots),
            cupy.asarray(slot_of),
        )
        logits = rms(x, norm) @ values.T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
        expected = np.take_along_axis(p, order, -1)
        if normalise:
            expected /= expected.sum(-1, keepdims=True)
        np.testing.assert_array_equal(cupy.asnumpy(ids), order)
        np.testing.assert_array_equal(cupy.asnumpy(slots), slot_of[order])
        assert error(weights, expected) < TOLERANCE
        assert error(hidden, rms(x, norm)) < TOLERANCE


def test_route_breaks_ties_by_index() -> None:
    ops = CudaOps({"logits": unwritten(1, 96), "counters": cupy.zeros(1, cupy.uint32)})
    router = CudaWeight(cupy.zeros(96 * 64 * 4, cupy.uint8), "F32", 96, 64)
    ids, slots = (cupy.full((1, 5), -1, cupy.int32) for _ in range(2))
    x, norm = cupy.asarray(floats(1, 64)), cupy.asarray(floats(64))
    ops.route(x, norm, 1e-6, router, True, unwritten(1, 64), ids, unwritten(1, 5), slots)
    np.testing.assert_array_equal(cupy.asnumpy(ids), [[0, 1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("matrix_type", "down_type", "e", "f", "top_k"),
    [
        ("Q4_K", "Q6_K", 2048, 768, 8),
        ("F32", "F32", 128, 64, 2),
        ("Q8_0", "Q8_0", 96, 160, 3),
        ("IQ3_S", "IQ4_XS", 512, 256, 10),
        ("MXFP4", "MXFP4", 320, 320, 4),
        ("Q5_K", "Q4_0", 256, 1440, 2),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_add(matrix_type: str, down_type: str, e: int, f: int, top_k: int, tokens: int) -> None:
    ops, count = CudaOps({"activation": unwritten(tokens * top_k, f)}), 11
    gate_bytes, down_bytes = f * row_bytes(matrix_type, e), e * row_bytes(down_type, f)
    gate_at, up_at = 0, -(-gate_bytes // 256) * 256
    down_at = 2 * up_at
    stride = down_at + -(-down_bytes // 256) * 256
    pool = cupy.full((count, stride), 0xAA, cupy.uint8)
    experts = []
    for slot in range(count):
        mats = [raw_matrix(matrix_type, f, e), raw_matrix(matrix_type, f, e), raw_matrix(down_type, e, f)]
        for (raw, _), type_, at in zip(
            mats, (matrix_type, matrix_type, down_type), (gate_at, up_at, down_at), strict=True
        ):
            pool[slot, at : at + raw.size] = on_device(ops, raw, type_)
        experts.append([values for _, values in mats])
    hidden, before = floats(tokens, e), floats(tokens, e)
    weights = RNG.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)
    slots = np.stack([RNG.choice(count, top_k, replace=False) for _ in range(tokens)]).astype(np.int32)
    slot_pool = CudaSlots(pool, stride, gate_at, up_at, down_at, matrix_type, matrix_type, down_type)
    residual = cupy.asarray(before)
    ops.experts_add(cupy.asarray(hidden), slot_pool, cupy.asarray(slots), cupy.asarray(weights), residual)
    added = np.zeros((tokens, e))
    for t in range(tokens):
        for r in range(top_k):
            gate, up, down = experts[slots[t, r]]
            a = gate @ hidden[t]
            added[t] += weights[t, r] * (down @ (a / (1 + np.exp(-a)) * (up @ hidden[t])))
    assert error(residual, before + added) < TOLERANCE
