"""Brings tensors from the file to their places on the device, in the device's layout.

Threads copy pieces of the file to the host's ring, which is where the disk is waited for; this thread sends them on, in
order, each to its place or, where blocks lie in planes there, through one piece of device memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.kernels.cuda_layout import LAYOUTS
from strata.kernels.cuda_ops import CudaOps
from strata.kernels.ops import Array
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.memory import Step

Bytes = NDArray[np.uint8]


class Matrix(NamedTuple):
    """One matrix or vector as stored, and its place: uint8, flat, of the same size."""

    stored: Bytes
    place: Array
    type: str


class _Piece(NamedTuple):
    matrix: Matrix
    first: int  # block
    blocks: int


class Uploader:
    """Copies matrices to the device.

    Parameters
    ----------
    device : CudaDevice
    ops : CudaOps
    ring : NDArray[np.uint8], shape (pieces, bytes)
        Host memory; page-locked is faster.
    piece : Array, uint8 [bytes]
        Device memory.
    """

    def __init__(self, device: CudaDevice, ops: CudaOps, ring: Bytes, piece: Array) -> None:
        self._device = device
        self._ops = ops
        self._ring = ring
        self._piece = piece

    def put(self, matrix: Matrix, source: Bytes | None = None, first: int = 0) -> None:
        """Send one matrix, or its blocks from `first` on which `source` holds; in order with the stream."""
        layout = LAYOUTS[matrix.type]
        source = matrix.stored if source is None else source
        step = len(self._piece) // layout.nbytes * layout.nbytes
        for start in range(0, len(source), step):
            part = source[start : start + step]
            block = first + start // layout.nbytes
            if layout.planes:
                self._device.to_device(self._piece, part)
                count = len(part) // layout.nbytes
                self._ops.to_planes(self._piece.data.ptr, matrix.place, matrix.type, block, count)
            else:
                self._device.to_device(matrix.place[block * layout.nbytes :], part)

    def load(self, matrices: Iterable[Matrix], step: Step) -> None:
        """Read matrices from the file, several pieces at a time."""
        free: deque[Bytes] = deque(self._ring)
        sent: deque[tuple[Any, Bytes]] = deque()
        read: deque[tuple[_Piece, Bytes, Future[None]]] = deque()
        with ThreadPoolExecutor(len(self._ring), "read") as threads:
            try:
                for piece in _pieces(matrices, self._ring.shape[1]):
                    if not free:
                        if not sent:
                            self._send(*read.popleft(), sent, step)
                        event, entry = sent.popleft()
                        event.synchronize()
                        free.append(entry)
                    entry = free.popleft()
                    read.append((piece, entry, threads.submit(_read, piece, entry)))
                    while read and read[0][2].done():
                        self._send(*read.popleft(), sent, step)
                while read:
                    self._send(*read.popleft(), sent, step)
            finally:  # Ctrl-C: no thread may write into the ring once it is given back
                threads.shutdown(cancel_futures=True)
                self._device.wait()

    def _send(
        self, piece: _Piece, entry: Bytes, done: Future[None], sent: deque[tuple[Any, Bytes]], step: Step
    ) -> None:
        done.result()
        nbytes = piece.blocks * LAYOUTS[piece.matrix.type].nbytes
        self.put(piece.matrix, entry[:nbytes], piece.first)
        sent.append((self._device.stream.record(), entry))
        step(nbytes)


def _pieces(matrices: Iterable[Matrix], nbytes: int) -> Iterator[_Piece]:
    for matrix in matrices:
        block = LAYOUTS[matrix.type].nbytes
        blocks, most = len(matrix.stored) // block, nbytes // block
        for first in range(0, blocks, most):
            yield _Piece(matrix, first, min(most, blocks - first))


def _read(piece: _Piece, entry: Bytes) -> None:
    block = LAYOUTS[piece.matrix.type].nbytes
    nbytes = piece.blocks * block
    entry[:nbytes] = piece.matrix.stored[piece.first * block : piece.first * block + nbytes]
