"""The embedding of a model whose head is another matrix: on the host, where the device reads it or gets its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.kernels.cuda_layout import LAYOUTS, BlockLayout
from strata.runtime.memory import PlannedMemory, Step

_STEP_BYTES = 16 << 20
LINE = "embedding"


class PinnedTable:
    """The table in page-locked memory, in the device's layout: the device looks tokens up by itself.

    Parameters
    ----------
    raw : NDArray[np.uint8], shape (V, bytes of a row)
        In the file.
    type : str
    memory : PlannedMemory

    Attributes
    ----------
    table : NDArray[np.uint8], flat
    stored_bytes : int
    """

    def __init__(self, raw: NDArray[np.uint8], type: str, memory: PlannedMemory) -> None:
        self._file = raw.reshape(-1)
        self._layout = LAYOUTS[type]
        self.table: NDArray[np.uint8] = memory.array(LINE, self._file.shape, np.uint8, name="token embedding")
        self.stored_bytes = raw.nbytes

    def load(self, step: Step) -> None:
        """Read the table."""
        nbytes = self._layout.nbytes
        blocks = len(self._file) // nbytes
        most = _STEP_BYTES // nbytes
        for first in range(0, blocks, most):
            count = min(most, blocks - first)
            part = self._file[first * nbytes : (first + count) * nbytes]
            _lay_out(part, self.table, self._layout, first)
            step(len(part))


class HostRows:
    """The table as stored, in RAM or in the file; its rows are brought to the device as they are needed.

    Parameters
    ----------
    raw : NDArray[np.uint8], shape (V, bytes of a row)
        In the file.
    type : str
    memory : PlannedMemory
    held : bool
        Whether the plan keeps it in RAM.
    """

    def __init__(self, raw: NDArray[np.uint8], type: str, memory: PlannedMemory, *, held: bool) -> None:
        self._file = raw
        self._layout = LAYOUTS[type]
        self._rows = memory.array(LINE, raw.shape, np.uint8, name="token embedding") if held else raw
        self.stored_bytes = raw.nbytes if held else 0

    def load(self, step: Step) -> None:
        """Read the table, where the plan keeps it in RAM."""
        if self._rows is self._file:
            return
        source, out = self._file.reshape(-1), self._rows.reshape(-1)
        for start in range(0, len(source), _STEP_BYTES):
            part = source[start : start + _STEP_BYTES]
            out[start : start + len(part)] = part
            step(len(part))

    def gather(self, tokens: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Write the tokens' rows as a matrix of as many rows as `out` [bytes] has room for, in the device's layout."""
        _lay_out(self._rows[list(tokens)], out, self._layout)


def _lay_out(stored: NDArray[np.uint8], out: NDArray[np.uint8], layout: BlockLayout, first: int = 0) -> None:
    """Write blocks as stored to a matrix in the device's layout, which is all of `out`, from its block `first` on."""
    given, blocks = stored.reshape(-1, layout.nbytes), len(out) // layout.nbytes
    start = 0
    for offset, size in layout.planes or ((0, layout.nbytes),):
        plane = out[start : start + blocks * size].reshape(blocks, size)
        plane[first : first + len(given)] = given[:, offset : offset + size]
        start += blocks * size
