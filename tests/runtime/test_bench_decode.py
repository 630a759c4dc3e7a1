"""Decode beside what this machine's RAM allows for the bytes it touches; both measured in one run."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.engine import Engine
from tests.demo import open_demo
from tests.runtime.plans import machine
from tests.tiny_model import TinyModel

pytestmark = [pytest.mark.bench, pytest.mark.demo]
THREADS = 2
STEPS = 40
PROMPT = 512


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_bytes_per_s(buffers: list[np.ndarray], pool: ThreadPoolExecutor) -> float:
    """RAM read speed of all threads together: each one takes the maximum of a buffer far larger than any cache.

    The buffers have two dimensions: for one, NumPy keeps the interpreter's lock and threads take turns.
    """
    elapsed = seconds(lambda: list(pool.map(np.max, buffers)))
    return sum(buffer.nbytes for buffer in buffers) / elapsed


def wide_model(folder: Path) -> GGUFFile:
    """Two layers in the shape of Qwen3-30B-A3B but for the number of experts; random weights, F32 in the file."""
    model = TinyModel(
        layers=2, embedding=2048, heads=32, kv_heads=4, head_size=128, vocab=8192, experts=16, top_k=8, width=768
    )
    return open_gguf(model.write(folder / "wide.gguf"))


@pytest.mark.parametrize("which", ["demo", "wide"])
def test_decode_beside_the_bandwidth_of_ram(which: str, tmp_path: Path) -> None:
    buffers = [np.ones((32 << 10, 2 << 10), np.float32) for _ in range(THREADS)]
    tokens = np.random.default_rng(1)
    with open_demo() if which == "demo" else wide_model(tmp_path) as file, ThreadPoolExecutor(THREADS) as pool:
        facts = read_model_facts(file)
        with Engine.load(file, make_plan(machine(8 << 30), facts, PlanOptions(max_context=1024))) as engine:
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
    cells = sum(facts.kv_heads) * (facts.key_length + facts.value_length) * (PROMPT + STEPS // 2)
    touched = 4 * (facts.dense.elements + facts.head.elements + experts + cells)
    step, speed = statistics.median(step_s), statistics.median(speeds)
    ratio = step / (touched / speed)
    print(f"\n{which}: prefill of {PROMPT} tokens: {PROMPT / prefill_s:.0f} tokens/s")
    print(f"decode: median {step * 1e3:.1f} ms ({min(step_s) * 1e3:.1f} to {max(step_s) * 1e3:.1f}), {1 / step:.1f}/s")
    print(f"a token touches {touched / 1e6:.0f} MB; RAM reads at {speed / 1e9:.1f} GB/s ({THREADS} threads, median)")
    print(f"decode takes {ratio:.2f} times what RAM allows")
