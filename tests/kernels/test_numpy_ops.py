"""Each op against plain float64, over small shapes and over scratch so small that every loop goes round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.gguf.model_facts import ModelFacts, TensorGroup
from strata.kernels.numpy_attention import widen
from strata.kernels.numpy_ops import NumpyOps
from strata.kernels.numpy_weights import NumpySlots, QuantRows
from strata.kernels.ops import ExpertWave, KvLayer, Rope, RopeStyle
from tests import reference
from tests.resident import DTYPES, make_workspace

EPS = 1e-5
few = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)
shapes = settings(max_examples=40, deadline=None)


def facts(**numbers: Any) -> ModelFacts:
    """The facts that the workspace depends on."""
    none = TensorGroup()
    defaults: dict[str, Any] = {
        "layers": 1,
        "embedding": 8,
        "heads": 2,
        "kv_heads": (1,),
        "key_length": 4,
        "value_length": 4,
        "vocab": 16,
        "feed_forward": 8,
        "experts": 0,
        "top_k": 0,
        "expert_width": 0,
    }
    return ModelFacts(
        name="small",
        architecture="llama",
        path="",
        file_bytes=0,
        header_bytes=0,
        header_sha256="",
        context_length=64,
        tied_head=True,
        embedding_table=none,
        head=none,
        dense=none,
        expert_classes=(),
        quant_types=(),
        **(defaults | numbers),
    )


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def maker(seed: int) -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape, np.float32)


@shapes
@given(few, few, st.lists(few, min_size=1, max_size=3), seeds)
def test_norm_project(tokens: int, embedding: int, widths: list[int], seed: int) -> None:
    make = maker(seed)
    x, norm = make(tokens, embedding), make(embedding)
    weights = [make(width, embedding) for width in widths]
    outs = [np.full((tokens, width), 77, np.float32) for width in widths]
    ops = NumpyOps(make_workspace(facts(embedding=embedding), tokens))
    ops.norm_project(x, norm, EPS, weights, outs)
    for weight, out in zip(weights, outs, strict=True):
        close(out, np.array([weight @ reference.rms(row, norm, EPS) for row in x]))


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_product_large_enough_for_pieces(tokens: int) -> None:
    """Three weights of which each is cut, one with a short last piece."""
    make = maker(tokens)
    x, norm = make(tokens, 1024), make(1024)
    weights = [make(rows, 1024) / 32 for rows in (1100, 700, 300)]
    found = {}
    for threads in (1, 2, 3):
        outs = [np.full((tokens, len(weight)), 77, np.float32) for weight in weights]
        ops = NumpyOps(make_workspace(facts(embedding=1024), tokens, threads=threads))
        ops.norm_project(x, norm, EPS, weights, outs)
        found[threads] = np.concatenate(outs, axis=1)
        np.testing.assert_array_equal(found[threads], found[1])
    normed = np.array([reference.rms(row, norm, EPS) for row in x])
    np.testing.assert_allclose(found[1], normed @ np.concatenate(weights).T.astype(np.float64), rtol=1e-4, atol=1e-5)


@shapes
@given(few, few, few, seeds)
def test_project_add_and_head(tokens: int, width: int, embedding: int, seed: int) -> None:
    make = maker(seed)
    ops = NumpyOps(make_workspace(facts(embedding=embedding), tokens))
    x, weight, residual = make(tokens, width), make(embedding, width), make(tokens, embedding)
    expected = residual + x.astype(np.float64) @ weight.T
    ops.project_add(x, weight, residual)
    close(residual, expected)
    norm, table, logits = make(embedding), make(7, embedding), np.full((tokens, 7), 77, np.float32)
    ops.head(residual, norm, EPS, table, logits)
    close(logits, np.array([table @ reference.rms(row, norm, EPS) for row in residual]))


@shapes
@given(few, st.lists(few, min_size=1, max_size=3), seeds)
def test_biases_and_norms_of_whole_rows(tokens: int, widths: list[int], seed: int) -> None:
    make = maker(seed)
    x, norm = make(tokens, 4), make(4)
    weights, biases = [make(width, 4) for width in widths], [make(width) for width in widths]
    outs = [np.full((tokens, width), 77, np.float32) for width in widths]
    ops = NumpyOps(make_workspace(facts(embedding=4), tokens))
    ops.norm_project(x, norm, EPS, weights, outs, biases)
    normed = np.array([reference.rms(row, norm, EPS) for row in x])
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        close(out, normed @ weight.T.astype(np.float64) + bias)
    norms, before = [make(width) for width in widths], [out.copy() for out in outs]
    ops.norm_rows(outs, norms, EPS)
    for out, rows, weight in zip(outs, before, norms, strict=True):
        close(out, np.array([reference.rms(row, weight, EPS) for row in rows]))


@pytest.mark.parametrize("scale", [1.0, 0.25, 12.0])
def test_scales(scale: float) -> None:
    make = maker(0)
    ops = routed(8, 4, 6, 2, 3)
    x, weight, norm, residual = make(3, 8), make(8, 8), make(8), make(3, 8)
    out = np.full((3, 8), 77, np.float32)
    ops.embed(weight, np.array([5, 0, 5]), out, scale=scale)
    close(out, scale * weight[[5, 0, 5]])
    expected = residual + scale * (x @ weight.T)
    ops.project_add(x, weight, residual, scale=scale)
    close(residual, expected)
    logits = np.full((3, 8), 77, np.float32)
    ops.head(x, norm, EPS, weight, logits, scale=scale)
    close(logits, scale * np.array([weight @ reference.rms(row, norm, EPS) for row in x]))
    ids, weights, router = np.empty((3, 2), np.int32), np.empty((3, 2), np.float32), make(6, 8)
    ops.route(x, norm, EPS, router, True, np.empty_like(x), ids, weights, scale=scale)
    close(weights.sum(axis=-1), np.full(3, scale))


@shapes
@given(st.integers(1, 9), few, few, st.integers(1, 4), st.booleans(), st.floats(0.1, 2), seeds)
def test_shared_ffn(tokens: int, embedding: int, width: int, block: int, shares: bool, scale: float, seed: int) -> None:
    make = maker(seed)
    numbers = {"embedding": embedding, "experts": 2, "top_k": 1, "expert_width": 1, "shared_width": width}
    buffers = make_workspace(facts(**numbers), tokens)
    buffers["ops.activation"] = buffers["ops.activation"][:block]
    hidden, residual = make(tokens, embedding), make(tokens, embedding)
    gate, up, down = make(width, embedding), make(width, embedding), make(embedding, width)
    share = make(embedding) if shares else None
    added = np.array([reference.gated(h, gate, up, down) for h in hidden])
    if share is not None:
        added /= 1 + np.exp(-(hidden.astype(np.float64) @ share))[:, None]
    expected, before = residual + scale * added, hidden.copy()
    NumpyOps(buffers).shared_ffn(hidden, share, gate, up, down, residual, scale=scale)
    close(residual, expected)
    np.testing.assert_array_equal(hidden, before)


def test_embed_takes_rows_as_stored_or_as_floats() -> None:
    ops = NumpyOps(make_workspace(facts(embedding=32), 4))
    table = np.arange(5 * 32, dtype=np.float32).reshape(5, 32)
    tokens = np.array([4, 0, 4, 2], np.int32)
    for stored in (
        table,
        QuantRows(table.view(np.uint8), "F32"),
        QuantRows(table.astype(np.float16).view(np.uint8), "F16"),
    ):
        out = np.full((4, 32), 77, np.float32)
        ops.embed(stored, tokens, out)
        np.testing.assert_array_equal(out, table[tokens])


@shapes
@given(few, few, few, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 40), seeds)
def test_rope_append(
    tokens: int, groups: int, share: int, pairs: int, norms: bool, neox: bool, partial: bool, position: int, seed: int
) -> None:
    make = maker(seed)
    size = 2 * pairs + (3 if partial else 0)  # `partial`: the last three dimensions of a head are not rotated
    style = RopeStyle.NEOX if neox else RopeStyle.NORM
    q, k, v = make(tokens, groups * share, size), make(tokens, groups, size), make(tokens, groups, 3)
    weights = (make(size), make(size)) if norms else None
    rope = Rope(style, 2 * pairs, (10.0 ** -np.arange(pairs)).astype(np.float32))
    kv = KvLayer(*(np.full((position + tokens + 2, groups, n), 77, np.float32) for n in (size, 3)))
    numbers = {"heads": groups * share, "kv_heads": (groups,), "key_length": size + size % 2, "value_length": 3}
    ops = NumpyOps(make_workspace(facts(**numbers), tokens))
    heads = [q.copy(), k.copy()]
    if weights:
        heads = [
            np.array([[reference.rms(head, w, EPS) for head in row] for row in x])
            for x, w in zip(heads, weights, strict=True)
        ]
    turned = [
        np.array(
            [
                [reference.rotate(head, position + t, rope.inverse_frequencies, style.value) for head in row]
                for t, row in enumerate(x)
            ]
        )
        for x in heads
    ]
    ops.rope_append(q, k, v, weights, EPS, rope, position, kv)
    close(q, turned[0])
    new = slice(position, position + tokens)
    close(kv.keys[new], turned[1])
    np.testing.assert_array_equal(kv.values[new], v)
    for cells in (kv.keys, kv.values):
        assert (np.delete(cells, np.arange(position, position + tokens), axis=0) == 77).all()


def test_angles_follow_position_and_rope() -> None:
    """The angles of a call are kept for its other layers, and for nothing else."""
    ops = NumpyOps(make_workspace(facts(), 4))
    ropes = [Rope(RopeStyle.NEOX, 4, np.array(f, np.float32)) for f in ([1, 0.5], [0.25, 2])]
    kv = KvLayer(np.zeros((9, 1, 4), np.float32), np.zeros((9, 1, 4), np.float32))
    for rope, position, tokens in [(ropes[0], 0, 2), (ropes[0], 3, 2), (ropes[1], 3, 2), (ropes[1], 3, 1)]:
        q, k = np.ones((tokens, 2, 4), np.float32), np.ones((tokens, 1, 4), np.float32)
        ops.rope_append(q, k, k.copy(), None, EPS, rope, position, kv)
        for t in range(tokens):
            close(q[t, 0], reference.rotate(np.ones(4), position + t, rope.inverse_frequencies, "neox"))


@shapes
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 30),
    st.sampled_from(["f16", "f32"]),
    st.integers(1, 4),
    st.integers(1, 7),
    seeds,
)
def test_attend(
    tokens: int, groups: int, share: int, position: int, kv: str, token_block: int, cell_block: int, seed: int
) -> None:
    make = maker(seed)
    heads, cells = groups * share, position + tokens
    numbers = {"heads": heads, "kv_heads": (groups,), "key_length": 4, "value_length": 3}
    buffers = make_workspace(facts(**numbers), tokens, kv)
    buffers["ops.scores"] = np.full((1, token_block * heads, cell_block), 77, np.float32)
    q = make(tokens, heads, 4)
    layer = KvLayer(*(make(cells + 3, groups, n).astype(DTYPES[kv]) for n in (4, 3)))
    layer.keys[cells:] = layer.values[cells:] = np.nan  # the future must not be looked at
    out = np.full((tokens, heads, 3), 77, np.float32)
    NumpyOps(buffers).attend(q, layer, position, 0.7, out)
    close(out, reference.attend(q, layer.keys[:cells], layer.values[:cells], position, 0.7))


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_attention_of_one_token_over_many_cells_in_threads(kv: str) -> None:
    """So many cells that each KV head is a task of its own."""
    numbers = {"heads": 8, "kv_heads": (4,), "key_length": 128, "value_length": 128}
    make = maker(3)
    q, layer = make(1, 8, 128), KvLayer(*(make(2100, 4, 128).astype(DTYPES[kv]) for _ in range(2)))
    outs = []
    for threads in (1, 2, 3):
        outs.append(np.full((1, 8, 128), 77, np.float32))
        NumpyOps(make_workspace(facts(**numbers), 1, kv, threads)).attend(q, layer, 2099, 0.1, outs[-1])
        np.testing.assert_array_equal(outs[0], outs[-1])
    close(outs[0], reference.attend(q, layer.keys, layer.values, 2099, 0.1))


def test_attention_stands_huge_scores() -> None:
    """A running maximum keeps the exponentials finite, whatever block the largest score is in."""
    buffers = make_workspace(facts(heads=1), 1)
    buffers["ops.scores"] = np.full((1, 16, 2), 77, np.float32)
    keys = np.zeros((6, 1, 4), np.float32)
    keys[:, 0, 0] = [-300, 200, 100, 500, -500, 300]
    values = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(6, 1, 4)
    out = np.empty((1, 1, 4), np.float32)
    NumpyOps(buffers).attend(np.ones((1, 1, 4), np.float32), KvLayer(keys, values), 5, 1.0, out)
    np.testing.assert_array_equal(out, 3)


def test_every_finite_half_is_widened_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    out = np.empty(halves.shape, np.float32)
    widen(halves, out)
    np.testing.assert_array_equal(out.view(np.uint32), halves.astype(np.float32).view(np.uint32))


@shapes
@given(st.integers(1, 9), few, few, st.integers(1, 4), seeds)
def test_dense_ffn(tokens: int, embedding: int, width: int, block: int, seed: int) -> None:
    make = maker(seed)
    buffers = make_workspace(facts(embedding=embedding, feed_forward=width), tokens)
    buffers["ops.activation"] = buffers["ops.activation"][:block]
    x, norm = make(tokens, embedding), make(embedding)
    gate, up, down = make(width, embedding), make(width, embedding), make(embedding, width)
    expected = np.array([row + reference.gated(reference.rms(row, norm, EPS), gate, up, down) for row in x])
    NumpyOps(buffers).dense_ffn(x, norm, EPS, gate, up, down)
    close(x, expected)


def routed(embedding: int, width: int, experts: int, top_k: int, tokens: int, threads: int = 1) -> NumpyOps:
    numbers = {"embedding": embedding, "experts": experts, "top_k": top_k, "expert_width": width}
    return NumpyOps(make_workspace(facts(**numbers), tokens, threads=threads))


@shapes
@given(few, few, st.integers(1, 9), st.data(), st.booleans(), seeds)
def test_route(tokens: int, embedding: int, experts: int, data: st.DataObject, normalise: bool, seed: int) -> None:
    make = maker(seed)
    top_k = data.draw(st.integers(1, experts))
    x, norm, router = make(tokens, embedding), make(embedding), make(experts, embedding)
    hidden = np.full((tokens, embedding), 77, np.float32)
    ids, weights = np.full((tokens, top_k), 77, np.int32), np.full((tokens, top_k), 77, np.float32)
    ops = routed(embedding, 1, experts, top_k, tokens)
    ops.route(x, norm, EPS, router, normalise, hidden, ids, weights)
    for t in range(tokens):
        h = reference.rms(x[t], norm, EPS)
        close(hidden[t], h)
        expected_ids, expected_weights = reference.route(h, router, top_k, normalise)
        close(weights[t], expected_weights)
        p = reference.softmax(router.astype(np.float64) @ h)
        close(p[ids[t]], p[expected_ids])  # the same experts but for ties within rounding
        assert len(set(ids[t])) == top_k


def test_ties_go_to_the_lower_index() -> None:
    ids, weights = np.empty((2, 3), np.int32), np.empty((2, 3), np.float32)
    router = np.zeros((9, 8), np.float32)
    router[6] = 1
    ops = routed(8, 1, 9, 3, 2)
    ops.route(
        np.ones((2, 8), np.float32),
        np.ones(8, np.float32),
        EPS,
        router,
        True,
        np.empty((2, 8), np.float32),
        ids,
        weights,
    )
    np.testing.assert_array_equal(ids, [[6, 0, 1]] * 2)
    assert (weights[:, 1] == weights[:, 2]).all()


def call(ids: np.ndarray, order: np.ndarray, place: np.ndarray) -> ExpertWave:
    """A wave of the experts that `ids` [T, K] names, in the order given; expert e lies in slot ``place[e]``."""
    where = [np.nonzero(ids == expert) for expert in order]
    return ExpertWave(
        [int(place[expert]) for expert in order], [tokens for tokens, _ in where], [ranks for _, ranks in where]
    )


@shapes
@given(st.integers(1, 9), few, few, st.integers(1, 6), st.data(), st.integers(1, 3), seeds)
def test_expert_ffn_and_combine(
    tokens: int, embedding: int, width: int, experts: int, data: st.DataObject, threads: int, seed: int
) -> None:
    make, rng = maker(seed), np.random.default_rng(seed)
    top_k = data.draw(st.integers(1, experts))
    slot_values = -(-2 * embedding * width // 16) * 16 + embedding * width
    slots = NumpySlots.over(make(experts + 4, slot_values), embedding, width)
    place = rng.permutation(experts + 4)
    hidden, ids = make(tokens, embedding), np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    results = np.full((tokens, top_k, embedding), 77, np.float32)
    order = rng.permutation(np.unique(ids))
    routed(embedding, width, experts, top_k, tokens, threads).expert_ffn(
        hidden, slots, call(ids, order, place), results
    )
    expected = np.array(
        [
            [
                reference.gated(
                    hidden[t],
                    slots.gate_up[place[e], :width],
                    slots.gate_up[place[e], width:],
                    slots.down[place[e]],
                )
                for e in ids[t]
            ]
            for t in range(tokens)
        ]
    )
    close(results, expected)
    weights, residual = make(tokens, top_k), make(tokens, embedding)
    summed = residual + (expected * weights[..., None]).sum(axis=1)
    routed(embedding, width, experts, top_k, tokens).combine(results, weights, residual)
    close(residual, summed)


@pytest.mark.parametrize("tokens", [1, 2, 300])
def test_threads_slots_and_company_change_no_bit_of_an_expert(tokens: int) -> None:
    """Large enough for threads; 300 tokens are more than one block of an expert's tokens."""
    embedding, width, experts, top_k = 192, 160, 8, 6
    make, rng = maker(tokens), np.random.default_rng(tokens)
    stored = make(experts, 3 * embedding * width)
    hidden = make(tokens, embedding)
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    found = []
    for threads, place, waves in [
        (1, np.arange(8), 1),
        (2, np.arange(8), 1),
        (3, np.arange(8) + 3, 1),
        (2, np.array([9, 2, 3, 4, 0, 11, 6, 7]), 1),
        (2, np.array([9, 2, 3, 4, 0, 11, 6, 7]), 3),
        (3, np.arange(8)[::-1], 8),
    ]:
        pool = np.full((12, stored.shape[1]), 77, np.float32)
        pool[place] = stored
        slots = NumpySlots.over(pool, embedding, width)
        ops = routed(embedding, width, experts, top_k, tokens, threads)
        results = np.full((tokens, top_k, embedding), 77, np.float32)
        for part in np.array_split(np.unique(ids), waves):
            if len(part):
                ops.expert_ffn(hidden, slots, call(ids, part, place), results)
        found.append(results)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_ranks_are_summed_in_order() -> None:
    """In float32, (1e8 + 1) - 1e8 is 0 but (1e8 - 1e8) + 1 is 1."""
    results = np.zeros((1, 3, 8), np.float32)
    results[0, :, 0], results[0, :, 1] = [1e8, 1, -1e8], [1e8, -1e8, 1]
    residual = np.zeros((1, 8), np.float32)
    routed(8, 1, 3, 3, 1).combine(results, np.ones((1, 3), np.float32), residual)
    np.testing.assert_array_equal(residual[0, :2], [0, 1])


def test_a_silent_gate_stays_silent() -> None:
    """exp(-g) overflows for a very negative gate; the result is 0, without a warning."""
    slots = NumpySlots.over(np.ones((1, 16 + 16), np.float32), 4, 2)
    slots.gate_up[0, :2] = -1000
    results = np.full((1, 1, 4), 77, np.float32)
    wave = ExpertWave([0], [np.array([0])], [np.array([0])])
    with np.errstate(all="raise"):
        routed(4, 2, 1, 1, 1).expert_ffn(np.ones((1, 4), np.float32), slots, wave, results)
    np.testing.assert_array_equal(results, 0)


def test_a_slot_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no expert of 4 x 4"):
        NumpySlots.over(np.zeros((2, 40), np.float32), 4, 4)


def test_an_error_in_a_task_reaches_the_caller() -> None:
    ops = routed(8, 4, 3, 3, 2, threads=3)
    slots = NumpySlots.over(np.zeros((2, 100), np.float32), 8, 4)
    ids = np.array([[0, 1, 2], [2, 1, 0]])
    with pytest.raises(IndexError):
        ops.expert_ffn(
            np.zeros((2, 8), np.float32), slots, call(ids, np.arange(3), np.arange(3)), np.zeros((2, 3, 8), np.float32)
        )
