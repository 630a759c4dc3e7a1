"""Tables and rows in the device's layout: one field of all blocks after the other, the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from strata.doctor.plan import Tier
from strata.kernels.cuda_layout import LAYOUTS
from strata.runtime.cuda.embedding import HostRows, PinnedTable
from strata.runtime.memory import PlannedMemory

from ..plans import plan_of, reservation

ROWS, BLOCKS = 40, 3


def in_planes(raw: np.ndarray, type_: str) -> bytes:
    """Planes of a matrix, written out plainly."""
    layout = LAYOUTS[type_]
    blocks = raw.reshape(-1, layout.nbytes)
    fields = layout.planes or ((0, layout.nbytes),)
    if not layout.planes:
        return raw.tobytes()
    return b"".join(block[at : at + size].tobytes() for at, size in fields for block in blocks)


def table(type_: str) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (ROWS, BLOCKS * LAYOUTS[type_].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("type_", LAYOUTS)
def test_a_pinned_table_is_the_whole_matrix_in_planes(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = table(type_)
    monkeypatch.setattr("strata.runtime.cuda.embedding._STEP_BYTES", 5 * LAYOUTS[type_].nbytes)
    done: list[int] = []
    with PlannedMemory(plan_of(reservation("embedding", raw.nbytes, Tier.PINNED))) as memory:
        pinned = PinnedTable(raw, type_, memory)
        pinned.load(done.append)
        assert pinned.table.tobytes() == in_planes(raw, type_)
    assert sum(done) == raw.nbytes == pinned.stored_bytes


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("type_", LAYOUTS)
def test_gathered_rows_are_a_small_matrix_in_planes(type_: str, held: bool) -> None:
    raw = table(type_)
    with PlannedMemory(plan_of(reservation("embedding", raw.nbytes))) as memory:
        rows = HostRows(raw, type_, memory, held=held)
        rows.load(lambda nbytes: None)
        out = np.zeros(8 * raw.shape[1], np.uint8)
        rows.gather([7, 39, 0], out)
        small = np.zeros((8, raw.shape[1]), np.uint8)
        small[:3] = raw[[7, 39, 0]]
        assert out.tobytes() == in_planes(small, type_)
