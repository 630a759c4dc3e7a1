"""Experts come whole through the ring, however they are cut, and no row of the ring is used twice before it is free."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.doctor.plan import Tier

from .simulated_cupy import Runtime, simulated_cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with simulated_cuda(monkeypatch, 1 << 20) as runtime:
        yield runtime


class Device:
    """Sends only when waited for, as a busy link might: what is overwritten before is lost."""

    def __init__(self) -> None:
        self.sent: list[tuple[np.ndarray, np.ndarray]] = []

    def send(self, to: np.ndarray, source: np.ndarray) -> None:
        self.sent.append((to, source))

    def wait(self) -> None:
        for to, source in self.sent:
            to[:] = source
        self.sent = []


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [1, 64, 999])
@pytest.mark.parametrize("count", [1, 3, 4, 11])
def test_all_bytes_arrive(
    threads: int, nbytes: int, count: int, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata.runtime.cuda import carry

    monkeypatch.setattr(carry, "_PIECE", 64)
    rng = np.random.default_rng(nbytes)
    stored = rng.integers(0, 256, (20, nbytes), dtype=np.uint8)

    def copy(key: int, out: np.ndarray) -> None:
        out[:] = stored[key]

    def held(key: int) -> tuple[Any, Tier]:
        return (None, Tier.FILE) if key % 3 == 0 else (stored[key], Tier.PAGEABLE)

    store = SimpleNamespace(ring=np.zeros((3, nbytes + 5), np.uint8), held=held, copy=copy)
    device = Device()
    places = np.zeros((count, nbytes), np.uint8)
    keys = rng.permutation(20)[:count].tolist()
    carrier = carry.Carrier(device, store, threads)  # type: ignore[arg-type]
    carried = carrier.carry(list(zip(keys, places, strict=True)))
    device.wait()
    np.testing.assert_array_equal(places, stored[keys])
    assert carried[Tier.FILE] == nbytes * sum(key % 3 == 0 for key in keys)
    assert sum(carried.values()) == nbytes * count
