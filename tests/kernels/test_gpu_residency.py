"""The kernel keeps the tables of its definition, and brings the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from strata.kernels.cuda_ops import CudaOps  # noqa: E402
from strata.kernels.numpy_residency import make_ready  # noqa: E402
from strata.kernels.residency import Policy  # noqa: E402

from .residencies import EXPERTS, LAYERS, NBYTES, calls, pool, tables  # noqa: E402

KEYS = LAYERS * EXPERTS


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("slots", [16, 17, 40])
@pytest.mark.parametrize(("word", "keeps"), [(16, True), (2, True), (16, False)])
def test_as_defined(
    policy: Policy, tokens: int, slots: int, word: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(slots)
    stored = cupy.cuda.alloc_pinned_memory(KEYS * NBYTES)
    host = np.frombuffer(stored, np.uint8, KEYS * NBYTES).reshape(KEYS, NBYTES)
    host[:] = rng.integers(0, 256, host.shape)
    sources = np.array([host.ctypes.data + key * NBYTES for key in range(KEYS)], np.uint64)
    sources[rng.random(KEYS) < 0.2] = 0
    uses = rng.integers(0, 50, KEYS)
    ops = CudaOps({"counters": cupy.zeros(1, cupy.uint32)})
    if not keeps:
        monkeypatch.setattr(ops, "_shared_limit", 0)
    expected, found = tables(policy, sources, uses), tables(policy, sources, uses, cupy.asarray)
    of_expected, of_found = pool(slots, word=word), pool(slots, cupy.asarray, word)

    def read(address: int, nbytes: int) -> Any:
        return host[(address - host.ctypes.data) // NBYTES]

    for layer, ids in calls(slots, 90, tokens):
        where, on_device = np.zeros_like(ids), cupy.zeros(ids.shape, cupy.int32)
        make_ready(expected, of_expected, layer, ids, where, read)
        ops.make_ready(found, of_found, layer, cupy.asarray(ids), on_device)
        np.testing.assert_array_equal(cupy.asnumpy(on_device), where)
        count = 1 + 2 * int(expected.wanted[0])
        np.testing.assert_array_equal(cupy.asnumpy(found.wanted[:count]), expected.wanted[:count])
    for name in ("slot_of", "use", "calls", "counts"):
        np.testing.assert_array_equal(cupy.asnumpy(getattr(found, name)), getattr(expected, name))
    np.testing.assert_array_equal(cupy.asnumpy(of_found.owner), of_expected.owner)
    np.testing.assert_array_equal(cupy.asnumpy(of_found.data), of_expected.data)
