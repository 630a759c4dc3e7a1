"""Who should leave the cache, by misses on random routing; how fast missing experts come; what a call of hits costs.

python -m pytest -m bench -s tests/kernels/test_bench_residency.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.kernels.numpy_residency import make_ready
from strata.kernels.residency import COUNTS, EMPTY, Policy, Pool, Tables

pytestmark = pytest.mark.bench

LAYERS, EXPERTS, TOP_K = 48, 128, 8
KEYS = LAYERS * EXPERTS
BYTES = 3_059_712  # of an expert of Qwen3-30B-A3B, Q4_K with down Q6_K


def routing(seed: int, tokens: int, drift: float) -> np.ndarray:
    """Draw int32 [tokens, layers, K]: odds by Zipf's law in each layer, and a mood that drifts from token to token."""
    rng = np.random.default_rng(seed)
    odds = np.stack([rng.permutation(-np.log(np.arange(1, EXPERTS + 1))) for _ in range(LAYERS)])
    mood = rng.standard_normal((LAYERS, EXPERTS))
    ids = np.zeros((tokens, LAYERS, TOP_K), np.int32)
    for token in range(tokens):
        mood = np.sqrt(1 - drift) * mood + np.sqrt(drift) * rng.standard_normal(mood.shape)
        ids[token] = np.argsort(-(odds + mood + 0.7 * rng.gumbel(size=mood.shape)), axis=1)[:, :TOP_K]
    return ids


def tables(policy: Policy, uses: np.ndarray | None, sources: np.ndarray, xp: Any = np) -> Tables:
    use = np.zeros((KEYS, 2), np.uint32)
    if uses is not None:
        use[:, 1] = uses
    return Tables(
        xp.full(KEYS, EMPTY, xp.int32),
        xp.asarray(use),
        xp.zeros(LAYERS, xp.uint32),
        xp.asarray(sources),
        xp.zeros(COUNTS, xp.uint64),
        xp.zeros(1 + 2 * TOP_K, xp.int32),
        EXPERTS,
        policy,
    )


@pytest.mark.parametrize("drift", [0.02, 0.0])
def test_policies(drift: float) -> None:
    """Misses a token in the second half of 700 tokens."""
    ids = routing(1 if drift else 2, 700, drift)
    half = len(ids) // 2
    uses = np.bincount((ids[:half] + np.arange(LAYERS)[:, None] * EXPERTS).ravel(), minlength=KEYS)
    one = np.zeros(2, np.uint8)
    for slots in (480, 1024, 2088):
        row = []
        for policy in Policy:
            t = tables(policy, uses if policy is Policy.PROFILE else None, np.ones(KEYS, np.uint64))
            pool = Pool(np.full(slots, EMPTY, np.int32), np.zeros(2 * slots, np.uint8), 2, 2, 2)
            out, warm = np.zeros((1, TOP_K), np.int32), 0
            for token in range(len(ids)):
                warm = int(t.counts[1]) if token == half else warm
                for layer in range(LAYERS):
                    make_ready(t, pool, layer, ids[token, layer][None], out, lambda *_: one)
            row.append(f"{policy.name} {(int(t.counts[1]) - warm) / (len(ids) - half):.1f}")
        print(f"\ndrift {drift}, {slots} slots of {KEYS}: {', '.join(row)} misses a token of {LAYERS * TOP_K}", end="")


@pytest.mark.gpu
def test_speed_of_filling() -> None:
    """Gigabytes a second of calls that miss one expert or eight, and the microseconds of a call that misses none."""
    cupy = pytest.importorskip("cupy")
    from strata.kernels.cuda_ops import CudaOps
    from strata.runtime.memory import HostBlock

    runtime, held, slots = cupy.cuda.runtime, 256, 2088
    host = HostBlock(held * BYTES).array(0, (held, BYTES), np.dtype(np.uint8))
    runtime.hostRegister(host.ctypes.data, host.nbytes, 3)
    sources = (host.ctypes.data + np.arange(KEYS, dtype=np.uint64) % held * BYTES).astype(np.uint64)
    stream = cupy.cuda.Stream(non_blocking=True)

    def seconds(run: Any) -> float:
        events = [cupy.cuda.Event() for _ in range(2)]
        events[0].record(stream)
        run()
        events[1].record(stream)
        events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*events)) / 1e3

    try:
        with stream:
            pool_bytes = cupy.zeros(slots * BYTES, cupy.uint8)
            for count in (1, 8):
                copied = np.median(
                    [seconds(lambda n=count: _copy(cupy, pool_bytes, host, n, stream)) for _ in range(9)]
                )
                print(f"\n{count} experts by cudaMemcpyAsync: {count * BYTES / copied / 1e9:.1f} GB/s", end="")
                ops = CudaOps({"counters": cupy.zeros(8, cupy.uint32)})
                t = tables(Policy.FREQUENCY_OVER_AGE, None, sources, cupy)
                pool = Pool(cupy.full(slots, EMPTY, cupy.int32), pool_bytes, BYTES, BYTES, 16)
                out = cupy.zeros((1, count), cupy.int32)
                ids = [cupy.arange(i, i + count, dtype=cupy.int32)[None] for i in range(0, EXPERTS, count)]
                calls = iter([(layer, each) for layer in range(LAYERS) for each in ids])
                ops.make_ready(t, pool, 47, ids[0], out)
                took = seconds(
                    lambda o=ops, t=t, p=pool, c=calls, s=out: [o.make_ready(t, p, *next(c), s) for _ in range(60)]
                )
                print(f", by make_ready {60 * count * BYTES / took / 1e9:.1f}", end="")
            stream.begin_capture()
            for _ in range(100):
                ops.make_ready(t, pool, 47, ids[0], out)
            graph = stream.end_capture()
            graph.launch(stream)
            print(f"\na call that misses none, of 100 in a graph: {seconds(lambda: graph.launch(stream)) * 1e4:.2f} us")
    finally:
        stream.synchronize()
        runtime.hostUnregister(host.ctypes.data)


def _copy(cupy: Any, to: Any, host: np.ndarray, count: int, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(to.data.ptr, host.ctypes.data, count * BYTES, 1, stream.ptr)
