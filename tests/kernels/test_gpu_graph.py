"""A decode step captured as one graph: the bits of the eager step, in any slots, for any position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from tests.kernels.gpu_model import SMALL, GpuModel  # noqa: E402


def generate(model: GpuModel, steps: int, graph: Any, stream: Any) -> list[np.ndarray]:
    """Decode `steps` steps of fixed random tokens, by `graph` or eagerly; return each step's logits."""
    rng = np.random.default_rng(5)
    tokens = len(model.tokens)
    for layer in model.layers:
        layer["kv"].keys.fill(0)
        layer["kv"].values.fill(0)
    logits = []
    for step in range(steps):
        model.tokens.set(rng.integers(0, SMALL.v, tokens, dtype=np.int32))
        model.position.fill(step * tokens)
        if graph is None:
            model.step()
        else:
            graph.launch(stream)
        logits.append(cupy.asnumpy(model.b["vocab"]))
    return logits


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_graph_and_slots_keep_the_bits(tokens: int) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        model = GpuModel(SMALL, tokens)
        model.ops.prepare(model.step)
        eager = generate(model, 9, None, stream)
        stream.begin_capture()
        model.step()
        graph = stream.end_capture()
        replayed = generate(model, 9, graph, stream)
        moved = GpuModel(SMALL, tokens, slot_order=np.random.default_rng(3).permutation(SMALL.n))
        elsewhere = generate(moved, 9, None, stream)
    assert all(np.isfinite(step).all() for step in eager)
    assert not np.array_equal(eager[0], eager[1])
    for a, b, c in zip(eager, replayed, elsewhere, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_tokens_together_equal_tokens_alone() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        together, alone = GpuModel(SMALL, 4), GpuModel(SMALL, 1)
        groups = generate(together, 3, None, stream)
        singles = generate(alone, 12, None, stream)
    np.testing.assert_array_equal(np.concatenate(groups), np.concatenate(singles))
