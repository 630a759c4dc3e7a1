"""How long a decode step takes in the shape of Qwen3-30B-A3B, all experts resident: run with -m "bench and gpu" -s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.bench]
cupy = pytest.importorskip("cupy")

from tests.kernels.gpu_model import QWEN3_30B, GpuModel  # noqa: E402

POSITIONS = (0, 128, 1024, 3800, 32_000)
REPETITIONS = 40


def capture(stream: Any, work: Callable[[], None]) -> Any:
    work()  # a kernel's first launch may not be captured
    stream.synchronize()
    stream.begin_capture()
    work()
    return stream.end_capture()


def microseconds(graph: Any, stream: Any, between: Callable[[], None] = lambda: None) -> np.ndarray:
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(REPETITIONS + 3):
        between()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop))
    return np.asarray(times[3:])


def test_decode_step() -> None:
    shape, stream = replace(QWEN3_30B, cells=33_000), cupy.cuda.Stream(non_blocking=True)
    rng = np.random.default_rng(0)
    with stream:
        model = GpuModel(shape, 1)
        model.ops.prepare(model.step)
        graph = capture(stream, model.step)

        def next_token() -> None:
            model.tokens.set(rng.integers(0, shape.v, 1, dtype=np.int32))
            model.position[...] += 1

        print("\n| position | median us | 10 % | 90 % | tok/s |\n| --- | --- | --- | --- | --- |")
        for position in POSITIONS:
            model.position.fill(position)
            times = microseconds(graph, stream, next_token)
            low, median, high = np.percentile(times, (10, 50, 90))
            print(f"| {position} | {median:.0f} | {low:.0f} | {high:.0f} | {1e6 / median:.0f} |")
            assert np.isfinite(cupy.asnumpy(model.b["vocab"])).all()

        model.position.fill(128)
        b, ops, x, eps = model.b, model.ops, model.b["x"], 1e-6
        sink = cupy.zeros_like(x)
        qkv = (b["q"], b["k"], b["v"])
        parts: dict[str, Callable[[dict[str, Any]], None]] = {
            "norm, q, k, v": lambda one: ops.norm_project(
                x, one["attn_norm"], eps, (one["q"], one["k"], one["v"]), qkv
            ),
            "attention": lambda one: ops.attention(
                *(*qkv, (one["q_norm"], one["k_norm"]), eps, model.rope, model.position, one["kv"]),
                *(shape.d**-0.5, b["attended"]),
            ),
            "output, residual": lambda one: ops.project_add(b["attended"].reshape(1, -1), one["o"], sink),
            "norm, router, choice": lambda one: ops.route(
                *(x, one["ffn_norm"], eps, one["router"], True, b["hidden"], model.ids, b["weights"], model.slots),
                model.slot_of,
            ),
            "experts (two kernels)": lambda one: ops.experts_add(
                b["hidden"], one["slots"], model.slots, b["weights"], sink
            ),
        }
        print("\n| per layer, at 128 | us |\n| --- | --- |")
        for name, part in parts.items():
            all_layers = capture(stream, lambda part=part: [part(one) for one in model.layers])  # type: ignore[misc]
            print(f"| {name} | {np.median(microseconds(all_layers, stream)) / shape.layers:.2f} |")
        head = capture(stream, lambda: ops.head(x, model.norm, eps, model.head, b["vocab"]))
        print(f"| head, once | {np.median(microseconds(head, stream)):.1f} |")
