"""Decode beside what this machine's RAM allows for the bytes it touches; both measured in one run."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strata.gguf.model_facts import read_model_facts
from strata.runtime.engine import Engine
from tests.demo import open_demo
from tests.runtime.plans import planned

pytestmark = [pytest.mark.bench, pytest.mark.demo]
THREADS = 2
STEPS = 40
PROMPT = 512


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_bytes_per_s(buffers: list[np.ndarray], pool: ThreadPoolExecutor) -> float:
    """RAM read speed of all threads together: each one takes the maximum of a buffer far larger than any cache."""
    elapsed = seconds(lambda: list(pool.map(np.max, buffers)))
    return sum(buffer.nbytes for buffer in buffers) / elapsed


def test_decode_beside_the_bandwidth_of_ram() -> None:
    buffers = [np.ones(64 << 20, np.float32) for _ in range(THREADS)]
    rng = np.random.default_rng(1)
    with open_demo() as file, ThreadPoolExecutor(THREADS) as pool:
        facts = read_model_facts(file)
        with Engine.load(file, planned(file, threads=THREADS, max_context=1024)) as engine:
            prompt = rng.integers(0, facts.vocab, PROMPT).tolist()
            engine.prefill(prompt)
            engine.resume(prompt[:1])
            prefill_s = seconds(lambda: engine.prefill(prompt[:PROMPT]))
            steps, speeds = [], []
            for token in rng.integers(0, facts.vocab, STEPS).tolist():
                steps.append(seconds(lambda token=token: engine.decode(token)))  # type: ignore[misc]
                speeds.append(read_bytes_per_s(buffers, pool) if len(steps) % 4 == 0 else speeds[-1] if speeds else 0)
    touched = 4 * (facts.dense.elements + facts.head.elements + sum(
        c.elements * len(c.layers) for c in facts.expert_classes) * facts.top_k)
    step, speed = statistics.median(steps), statistics.median(s for s in speeds if s)
    floor = touched / speed
    print(f"\nprefill {PROMPT} tokens: {PROMPT / prefill_s:.0f}/s")
    print(f"decode: median {step * 1e3:.1f} ms ({min(steps) * 1e3:.1f} to {max(steps) * 1e3:.1f}), {1 / step:.1f} tokens/s")
    print(f"bytes touched: {touched / 1e6:.0f} MB; RAM read: {speed / 1e9:.1f} GB/s; floor {floor * 1e3:.1f} ms")
    print(f"decode / floor: {step / floor:.2f}")
    assert step < 2 * floor
