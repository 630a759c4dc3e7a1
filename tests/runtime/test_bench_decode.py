"""Decode beside what this machine's RAM allows for the bytes it touches; both measured in one run."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
    tokens = np.random.default_rng(1)
    with open_demo() as file, ThreadPoolExecutor(THREADS) as pool:
        facts = read_model_facts(file)
        with Engine.load(file, planned(file, threads=THREADS, max_context=1024)) as engine:
            prompt = tokens.integers(0, facts.vocab, PROMPT).tolist()
            engine.prefill(prompt)  # warm: every expert is in its slot
            engine.resume(prompt[:1])
            prefill_s = seconds(lambda: engine.prefill(prompt))
            step_s, speeds = [], []
            for step in range(STEPS):  # both in turn, so that what else runs here slows both
                token = int(tokens.integers(0, facts.vocab))
                step_s.append(seconds(partial(engine.decode, token)))
                if step % 4 == 0:
                    speeds.append(read_bytes_per_s(buffers, pool))
    experts = sum(each.elements * len(each.layers) for each in facts.expert_classes) * facts.top_k
    touched = 4 * (facts.dense.elements + facts.head.elements + experts)
    step, speed = statistics.median(step_s), statistics.median(speeds)
    ratio = step / (touched / speed)
    print(f"\nprefill of {PROMPT} tokens: {PROMPT / prefill_s:.0f} tokens/s")
    print(f"decode: median {step * 1e3:.1f} ms ({min(step_s) * 1e3:.1f} to {max(step_s) * 1e3:.1f}), {1 / step:.1f}/s")
    print(f"a token touches {touched / 1e6:.0f} MB; RAM reads at {speed / 1e9:.1f} GB/s ({THREADS} threads, median)")
    print(f"decode takes {ratio:.2f} times what RAM allows")
