"""The ops for prompts on the device against float64; and no bit of a result depends on the tile that it lies in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from strata.gguf.cuda_prompt_footprint import prompt_workspace  # noqa: E402
from strata.kernels.cuda_layout import LAYOUTS, PROMPT_TILE_ROWS, row_bytes  # noqa: E402
from strata.kernels.cuda_ops import CudaOps, CudaSlots  # noqa: E402
from strata.kernels.cuda_prompt import PromptOps  # noqa: E402
from strata.kernels.kv_int8 import dequantise_cells  # noqa: E402
from strata.kernels.ops import KvLayer, Rope, RopeStyle  # noqa: E402

from .test_gpu_ops import cells_of, error, floats, matrix, on_device, raw_matrix, rms, rotate, unwritten  # noqa: E402

TOLERANCE = 1e-5
RNG = np.random.default_rng(12)
TYPES = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "u8": np.uint8}


def prompt_ops(tokens: int, e: int, *, n: int = 0, k: int = 0, f: int = 0, width: int = 0) -> PromptOps:
    """Ops over scratch that holds NaN, or nonsense; `width` of a feed-forward that all tokens take."""
    model = SimpleNamespace(embedding=e, heads=1, kv_heads=[1], key_length=16, value_length=16, layers=1, vocab=1)
    vars(model).update(experts=n, top_k=k, expert_width=f, shared_width=width, feed_forward=width)
    model.embedding_table = SimpleNamespace(bytes=0)
    scratch = {}
    for spec in prompt_workspace(model, tokens):  # type: ignore[arg-type]
        array = cupy.zeros(spec.shape, TYPES[spec.dtype])
        if spec.dtype != "u32":
            array.view(np.uint8)[...] = 0xFF
        scratch[spec.name.removeprefix("prompt.")] = array
    return PromptOps(CudaOps({}), scratch, f)


def in_float64(kept: Any, scales: Any, count: int) -> np.ndarray:
    """Return the first cells of keys or values."""
    found = cupy.asnumpy(kept[:count])
    if scales is None:
        return found.astype(np.float64)
    out = np.empty(found.shape, np.float32)
    dequantise_cells(found, cupy.asnumpy(scales[:count]), out)
    return out.astype(np.float64)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("tokens", [9, 40, 131])
@pytest.mark.parametrize("type_", LAYOUTS)
def test_norm_project(type_: str, tokens: int) -> None:
    of_block = LAYOUTS[type_].columns
    columns = 768 if of_block == 256 else 416 // of_block * of_block  # not whole steps of 64 but for blocks of 64
    ops = prompt_ops(tokens, columns)
    x, norm = floats(tokens, columns), floats(columns)
    pairs = [matrix(ops._ops, type_, rows, columns) for rows in (301, 5)]
    if columns == 768:
        pairs.insert(1, matrix(ops._ops, "Q6_K", 77, columns))
    biases = [floats(weight.rows) for weight, _ in pairs]
    outs = [unwritten(tokens, weight.rows) for weight, _ in pairs]
    weights = [weight for weight, _ in pairs]
    ops.norm_project(cupy.asarray(x), cupy.asarray(norm), 1e-6, weights, outs, list(map(cupy.asarray, biases)))
    for (_, values), out, bias in zip(pairs, outs, biases, strict=True):
        assert error(out, rms(x, norm) @ values.T + bias) < TOLERANCE


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_row_is_the_same_in_any_tile(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, columns = prompt_ops(70, 512), 512
    x = cupy.asarray(floats(70, columns))
    weight, values = matrix(ops._ops, type_, 150, columns)
    found = []
    for tile in PROMPT_TILE_ROWS:
        monkeypatch.setattr(ops, "_tile_rows", lambda rows, tile=tile: tile)
        for first in (0, 41):
            residual = cupy.zeros((70 - first, 150), cupy.float32)
            ops.project_add(x[first:], weight, residual, scale=0.5)
            found.append(cupy.asnumpy(residual)[41 - first :])
    assert error(found[0], 0.5 * cupy.asnumpy(x)[41:] @ values.T) < TOLERANCE
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_large_and_small_rows_keep_their_digits() -> None:
    """Activations go in halves, whose range is far less than that of floats."""
    ops, columns = prompt_ops(16, 256), 256
    x = floats(16, columns) * 10.0 ** np.arange(-20, 12, 2, dtype=np.float32)[:, None]
    weight, values = matrix(ops._ops, "Q4_K", 64, columns)
    out = cupy.zeros((16, 64), cupy.float32)
    ops.project_add(cupy.asarray(x), weight, out)
    expected = x.astype(np.float64) @ values.T
    for t in range(16):
        assert error(out[t], expected[t]) < TOLERANCE


@pytest.mark.parametrize("up_type", ["Q8_0", "Q4_0"])
def test_dense_ffn(up_type: str) -> None:
    tokens, columns, width = 21, 576, 1536
    ops = prompt_ops(tokens, columns, width=width)
    x, norm = floats(tokens, columns), floats(columns)
    (gate, gates), (up, ups) = (matrix(ops._ops, type_, width, columns) for type_ in ("Q8_0", up_type))
    down, downs = matrix(ops._ops, "Q5_K", columns, width)
    residual = cupy.asarray(x)
    ops.dense_ffn(residual, cupy.asarray(norm), 1e-6, gate, up, down)
    h = rms(x, norm)
    assert error(residual, x + (silu(h @ gates.T) * (h @ ups.T)) @ downs.T) < TOLERANCE


@pytest.mark.parametrize(("tokens", "n", "k"), [(9, 6, 3), (100, 5, 2), (64, 130, 8)])
@pytest.mark.parametrize(("type_", "down_type"), [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("F16", "F32")])
def test_route_experts_and_a_shared_one(tokens: int, n: int, k: int, type_: str, down_type: str) -> None:
    e, f = 256, 256
    ops = prompt_ops(tokens, e, n=n, k=k, f=f, width=96)
    scratch: Any = ops._scratch
    x, norm = floats(tokens, e), floats(e)
    router, routes = matrix(ops._ops, "F32", n, e)
    ids, weights = scratch["ids"], scratch["weights"]
    ops.route(cupy.asarray(x), cupy.asarray(norm), 1e-6, router, True, scratch["hidden"], ids, weights, scale=0.7)
    h = rms(x, norm)
    logits = h @ routes.T
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(cupy.asnumpy(ids), best)
    chosen = np.exp(np.take_along_axis(logits, best, 1) - logits.max(1, keepdims=True))
    shares = 0.7 * chosen / chosen.sum(1, keepdims=True)
    assert error(weights, shares) < TOLERANCE

    experts = [[raw_matrix(type_, f, e), raw_matrix(type_, f, e), raw_matrix(down_type, e, f)] for _ in range(n)]
    gate_bytes, down_bytes = f * row_bytes(type_, e), e * row_bytes(down_type, f)
    stride = -(-(2 * gate_bytes + down_bytes) // 256) * 256
    pool = cupy.zeros((n, stride), cupy.uint8)
    for i, parts in enumerate(experts):
        start = 0
        for (raw, _), kind in zip(parts, (type_, type_, down_type), strict=True):
            pool[i, start : start + raw.size] = on_device(ops._ops, raw, kind)
            start += raw.size
    slots = CudaSlots(pool, stride, 0, gate_bytes, 2 * gate_bytes, type_, type_, down_type)
    before = floats(tokens, e)
    residual = cupy.asarray(before)
    ops.experts_add(slots, ids, weights, residual, scratch["counts"][0])
    expected = before.astype(np.float64)
    for t in range(tokens):
        for r in range(k):
            (_, gate), (_, up), (_, down) = experts[best[t, r]]
            expected[t] += shares[t, r] * (down @ (silu(gate @ h[t]) * (up @ h[t])))
    assert error(cupy.asnumpy(residual) - before, expected - before) < TOLERANCE
    np.testing.assert_array_equal(cupy.asnumpy(scratch["counts"][0]), np.bincount(best.ravel(), minlength=n))

    (gate, gates), (up, ups) = (matrix(ops._ops, "Q8_0", 96, e) for _ in range(2))
    down, downs = matrix(ops._ops, "Q4_0", e, 96)
    share = floats(e)
    residual = cupy.zeros((tokens, e), cupy.float32)
    ops.shared_ffn(scratch["hidden"], cupy.asarray(share), gate, up, down, residual, scale=0.7)
    taken = 0.7 / (1 + np.exp(-(h @ share)))
    assert error(residual, taken[:, None] * ((silu(h @ gates.T) * (h @ ups.T)) @ downs.T)) < TOLERANCE


@pytest.mark.parametrize(("position", "tokens"), [(0, 9), (0, 150), (61, 20), (1000, 37)])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "dims", "style", "normed", "dtype"),
    [
        (32, 4, 128, 128, RopeStyle.NEOX, True, "float16"),
        (6, 2, 32, 32, RopeStyle.NORM, False, "float32"),
        (9, 3, 64, 64, RopeStyle.NORM, False, "float16"),
        (4, 2, 16, 16, RopeStyle.NEOX, True, "float16"),
        (4, 1, 128, 64, RopeStyle.NEOX, True, "float32"),
        (4, 2, 256, 64, RopeStyle.NEOX, True, "float16"),
        (2, 2, 256, 256, RopeStyle.NEOX, False, "float32"),
        (8, 2, 128, 128, RopeStyle.NEOX, True, "int8"),
        (4, 2, 32, 32, RopeStyle.NORM, False, "int8"),
        (4, 1, 256, 64, RopeStyle.NEOX, True, "int8"),
    ],
)
def test_attention(
    position: int,
    tokens: int,
    heads: int,
    groups: int,
    size: int,
    dims: int,
    style: RopeStyle,
    normed: bool,
    dtype: str,
) -> None:
    ops, cells = prompt_ops(tokens, 16), position + tokens
    q, k, v = floats(tokens, heads, size), floats(tokens, groups, size), floats(tokens, groups, size)
    old = [floats(position, groups, size) for _ in range(2)]
    norms = (floats(size), floats(size)) if normed else None
    inverse = (1e4 ** (-np.arange(0, dims, 2) / dims)).astype(np.float32)

    def run(cuts: tuple[int, ...]) -> tuple[np.ndarray, KvLayer]:
        """In chunks that start at `cuts`; cells past the last one are NaN."""
        empty = np.full((cells + 100, groups, size), np.nan, np.float32)
        kept = []
        for part in old:
            made, scales = cells_of(empty, dtype)
            made[:position], old_scales = cells_of(part, dtype)
            if scales is not None:
                scales[:position] = old_scales
            kept.append((cupy.asarray(made), None if scales is None else cupy.asarray(scales)))
        (made_keys, key_scales), (made_values, value_scales) = kept
        kv = KvLayer(made_keys, made_values, key_scales, value_scales)
        out = unwritten(tokens, heads, size)
        for start, stop in zip(cuts, (*cuts[1:], tokens), strict=True):
            queries, new_keys, new_values = (cupy.asarray(part[start:stop]) for part in (q, k, v))
            on_it = tuple(map(cupy.asarray, norms)) if norms else None
            at = cupy.full(1, position + start, cupy.int32)
            rope = Rope(style, dims, cupy.asarray(inverse))
            chunk = out[start:stop]
            ops.attention(queries, new_keys, new_values, on_it, 1e-6, rope, at, kv, size**-0.5, chunk)
        return cupy.asnumpy(out), kv

    out, kv = run((0,))
    normed_q = rms(q, norms[0]) if norms else q.astype(np.float64)
    rotated = rotate(normed_q, position, dims, style, inverse)
    keys, values = (in_float64(*part, cells) for part in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)))
    expected = np.empty((tokens, heads, size))
    for t in range(tokens):
        seen = position + t + 1
        for head in range(heads):
            g = head // (heads // groups)
            scores = keys[:seen, g] @ rotated[t, head] * size**-0.5
            shares = np.exp(scores - scores.max())
            expected[t, head] = shares / shares.sum() @ values[:seen, g]
    assert error(out, expected) < TOLERANCE
    again, _ = run((0, tokens // 2))
    np.testing.assert_array_equal(again, out)
