"""Causal attention on the numpy backend: blocks of cells with a running softmax, so scratch stays small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.kernels.kv_int8 import dequantise_cells
from strata.kernels.numpy_math import Floats
from strata.kernels.ops import KvLayer
from strata.kernels.workers import WORTH_A_THREAD, Workers

_FEW_ROWS = 8  # of a matrix product, below which as many matrix-vector products are faster


class NumpyAttention:
    """Attention over a KV cache, in the scratch of a workspace.

    Blocks of tokens and cells are cut at fixed places (how large they are, the shape of the scratch says), and a
    block's arithmetic knows nothing of the thread that runs it.
    """

    def __init__(self, workspace: Mapping[str, Floats], workers: Workers) -> None:
        threads, self._rows, self._cell_block = workspace["ops.scores"].shape  # rows: tokens x H
        self._queries = workspace["ops.queries"].reshape(threads, -1)
        self._scores = workspace["ops.scores"].reshape(threads, -1)
        self._attended = workspace["ops.attended"].reshape(threads, 2, -1)
        self._cells = workspace["ops.cells"].reshape(threads, 2, -1) if "ops.cells" in workspace else None
        self._workers = workers

    def __call__(self, q: Floats, kv: KvLayer, position: int, scale: float, out: Floats) -> None:
        """See `strata.kernels.ops.Ops.attend`."""
        tokens, groups = len(q), kv.keys.shape[1]
        block = self._rows // q.shape[1]
        multiplications = 2 * (position + tokens) * q.size
        if tokens == 1 and multiplications >= 4 * WORTH_A_THREAD:
            heads = [slice(group, group + 1) for group in range(groups)]
        else:
            heads = [slice(0, groups)]
        self._workers.run(
            [
                partial(self._block, q, kv, position, scale, out, slice(start, start + block), group)
                for start in range(0, tokens, block)
                for group in heads
            ],
            multiplications,
        )

    def _block(
        self,
        q: Floats,
        kv: KvLayer,
        position: int,
        scale: float,
        out: Floats,
        tokens: slice,
        groups: slice,
        worker: int,
    ) -> None:
        """Attend with the tokens and KV heads of two slices."""
        kv_heads = kv.keys.shape[1]
        q, out = _grouped(q[tokens], kv_heads)[groups], _grouped(out[tokens], kv_heads)[groups]
        g, t, r, size = q.shape  # KV heads, tokens, query heads per KV head, head size
        first, block = position + tokens.start, self._cell_block
        queries = _shaped(self._queries[worker], (g, t * r, size))
        np.multiply(q, scale, out=queries.reshape(q.shape))
        total, part = (_shaped(scratch, (g, t * r, out.shape[-1])) for scratch in self._attended[worker])
        highest = weight = queries[..., :1]  # highest score so far and sum of exponentials; the first block sets them
        for start in range(0, first + t, block):
            cells = slice(start, min(start + block, first + t))
            scores = _shaped(self._scores[worker], (g, t * r, cells.stop - start))
            _products(
                self._widened(kv.keys, kv.key_scales, (cells, groups), worker, 0).transpose(1, 0, 2), queries, scores
            )
            if cells.stop > first + 1:
                future = np.arange(start, cells.stop) > np.arange(first, first + t)[:, None]
                np.copyto(scores.reshape(g, t, r, -1), -np.inf, where=future[:, None])
            new = scores.max(axis=-1, keepdims=True)
            if start > 0:
                np.maximum(highest, new, out=new)
            np.exp(np.subtract(scores, new, out=scores), out=scores)
            values = self._widened(kv.values, kv.value_scales, (cells, groups), worker, 1).transpose(1, 2, 0)
            if start == 0:
                _products(values, scores, total)
                weight = scores.sum(axis=-1, keepdims=True)
            else:
                decay = np.exp(highest - new)
                total *= decay
                _products(values, scores, part)
                total += part
                weight = weight * decay + scores.sum(axis=-1, keepdims=True)
            highest = new
        np.divide(total.reshape(out.shape), weight.reshape(g, t, r, 1), out=out)

    def _widened(
        self,
        cache: NDArray[Any],
        scales: NDArray[np.float16] | None,
        where: tuple[slice, slice],
        worker: int,
        which: int,
    ) -> Floats:
        """Some cells of some heads as float32: themselves, or a copy in scratch."""
        cells = cache[where]
        if cells.dtype == np.float32:
            return cells
        assert self._cells is not None, "a KV cache that is not f32 needs a workspace made for it"
        wide = _shaped(self._cells[worker, which], cells.shape)
        if scales is None:
            widen(cells, wide)
        else:
            dequantise_cells(cells, scales[where], wide)
        return wide


def _grouped(heads: Floats, groups: int) -> Floats:
    """View [T, H, D] as [G, T, H / G, D]."""
    tokens, count, size = heads.shape
    return heads.reshape(tokens, groups, count // groups, size).transpose(1, 0, 2, 3)


def _products(cells: Floats, rows: Floats, out: Floats) -> None:
    """``out[g] = rows[g] @ cells[g].T``: for the few rows of a decode step one by one, as packing costs more."""
    if rows.shape[1] < _FEW_ROWS:
        np.matmul(cells[:, None], rows[..., None], out=out[..., None])
    else:
        np.matmul(rows, cells.transpose(0, 2, 1), out=out)


def _shaped(scratch: Floats, shape: tuple[int, ...]) -> Floats:
    """View the start of a worker's scratch in a shape."""
    return scratch[: math.prod(shape)].reshape(shape)


def widen(half: NDArray[np.float16], out: Floats) -> None:
    """Turn finite float16 into float32, exactly, several times faster than a cast.

    Moves the sign, exponent and mantissa to their places in a float32, whose exponent is then too small by the
    difference of the biases: 127 - 15 = 112. Subnormals come out right too.
    """
    bits = out.view(np.int32)
    np.copyto(bits, half.view(np.int16))  # extends the sign
    bits <<= 13
    bits &= np.int32(-0x70002000)  # 0x8FFFE000: without the two copies of the sign bit
    out *= np.float32(2.0**112)
