"""How fast experts come from pageable memory through the ring, by threads.

python -m pytest -m "bench and gpu" -s tests/runtime/cuda/test_bench_carry.py
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from strata.doctor.plan import Tier

pytestmark = [pytest.mark.bench, pytest.mark.gpu]
cupy = pytest.importorskip("cupy")

from strata.runtime.cuda.carry import Carrier  # noqa: E402
from strata.runtime.cuda.device import CudaDevice  # noqa: E402
from strata.runtime.memory import HostBlock  # noqa: E402

BYTES = 3_059_712  # of an expert of Qwen3-30B-A3B, Q4_K with down Q6_K
HELD, RING = 600, 16


def test_speed_by_threads() -> None:
    from .machine import facts

    assert facts().cuda.value is not None
    device = CudaDevice.open(str(facts().cuda.value.devices[0].uuid))
    stored = HostBlock(HELD * BYTES).array(0, (HELD, BYTES), np.dtype(np.uint8))
    stored[:] = np.arange(HELD, dtype=np.uint16).astype(np.uint8)[:, None]
    ring = HostBlock(RING * BYTES).array(0, (RING, BYTES), np.dtype(np.uint8))
    cupy.cuda.runtime.hostRegister(ring.ctypes.data, ring.nbytes, 3)
    pointer = cupy.cuda.runtime.malloc(RING * BYTES)
    try:
        memory = cupy.cuda.UnownedMemory(pointer, RING * BYTES, None)
        places = cupy.ndarray((RING, BYTES), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        store = SimpleNamespace(ring=ring, held=lambda key: (stored[key], Tier.PAGEABLE))
        for threads in (1, 2, 4, 8, 16):
            carrier = Carrier(device, store, threads)  # type: ignore[arg-type]
            row = []
            for count in (1, 4, 16):
                took = []
                for repetition in range(15):
                    keys = [(repetition * count + i) * 7 % HELD for i in range(count)]
                    device.wait()
                    started = time.perf_counter()
                    carrier.carry([(key, places[i]) for i, key in enumerate(keys)])
                    device.wait()
                    took.append(time.perf_counter() - started)
                seconds = float(np.median(took))
                row.append(f"{count}: {count * BYTES / seconds / 1e9:.1f} GB/s ({seconds * 1e6:.0f} us)")
            print(f"\n{threads} threads, experts at once: {', '.join(row)}", end="")
    finally:
        device.drain()
        cupy.cuda.runtime.hostUnregister(ring.ctypes.data)
        cupy.cuda.runtime.free(pointer)
        device.close()
