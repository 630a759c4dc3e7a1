"""The ops for the many tokens of a prompt: products on the matrix units, straight from quantised blocks.

Activations go to the matrix units in two halves, which are made once per matrix product ("split rows", see
``cuda/prompt.cu``). Tiles follow from shapes; which tile a row lies in changes no bit of its result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.kernels.cuda_arguments import cells_of, choice_of, heads_of, pointer
from strata.kernels.cuda_layout import PROMPT_TILE_ROWS
from strata.kernels.cuda_ops import CudaOps, CudaSlots, CudaWeight
from strata.kernels.ops import Array, KvLayer, Rope, RopeStyle

_RESULTS = 128  # that a block of a product makes (kRows in cuda/prompt_product.cu)
_PRODUCT_THREADS = 256
_SORT_WARPS = _SPLIT_WARPS = _ROUTE_WARPS = 4  # of a block
_PARTS = 3  # matrices that share a launch
_STEP_BYTES = 128  # of a row in shared memory: 64 halves


class _Part(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("first_block", ctypes.c_int),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("at", _Part * _PARTS),
        ("tiles", ctypes.c_void_p),
        ("tile_count", ctypes.c_void_p),
        ("stride", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("x", "sums", "scales", "sources", "to", "share")),
        *((name, ctypes.c_int) for name in ("count", "divide", "rows", "k", "add")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One of a product: its address, rows, where results go and what is added to them."""

    type: str
    data: int
    rows: int
    out: Array
    bias: Array | None = None

    @classmethod
    def of(cls, weight: CudaWeight, out: Array, bias: Array | None = None) -> _Matrix:
        return cls(weight.type, int(weight.data.data.ptr), weight.rows, out, bias)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How rows are cut: `rows` at a time; or as `sort_experts` has it, into `most` at most, slots `stride` apart."""

    rows: int
    of: Array | None = None
    count: Array | None = None
    most: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class _Split:
    """Split rows: `x` as many bytes as the floats they were made of."""

    x: Array
    sums: Array
    scales: Array


class PromptOps:
    """`strata.kernels.ops.Ops` for more tokens than the decode kernels take.

    Parameters
    ----------
    ops : CudaOps
        Launches the kernels.
    scratch : mapping of str to Array
        See `strata.gguf.cuda_prompt_footprint`.
    expert_width : int
        F.
    """

    def __init__(self, ops: CudaOps, scratch: Mapping[str, Array], expert_width: int) -> None:
        self._ops = ops
        self._width = expert_width
        self._scratch = scratch
        self._shared = ops.shared_bytes
        self._copies_ahead = ops.arch >= 80
        self._hidden = _Split(*(scratch.get(name) for name in ("hidden", "hidden_sums", "hidden_scales")))

    def embed(self, table: CudaWeight, tokens: Array, out: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.embed`."""
        self._ops.embed(table, tokens, out, scale=scale)

    def norm_project(
        self,
        x: Array,
        norm: Array,
        eps: float,
        weights: Sequence[CudaWeight],
        outs: Sequence[Array],
        biases: Sequence[Array] | None = None,
    ) -> None:
        """See `strata.kernels.ops.Ops.norm_project`."""
        rows = self._split(x, norm, eps)
        parts = [
            _Matrix.of(weight, out, bias)
            for weight, out, bias in zip(weights, outs, biases or [None] * len(weights), strict=True)
        ]
        for type_ in dict.fromkeys(part.type for part in parts):
            same = [part for part in parts if part.type == type_]
            for start in range(0, len(same), _PARTS):
                self._dense(rows, x, same[start : start + _PARTS])

    def norm_rows(self, rows: Sequence[Array], norms: Sequence[Array], eps: float) -> None:
        """See `strata.kernels.ops.Ops.norm_rows`."""
        self._ops.norm_rows(rows, norms, eps)

    def project_add(self, x: Array, weight: CudaWeight, residual: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.project_add`."""
        self._dense(self._split(x), x, [_Matrix.of(weight, residual)], add=True, scale=scale)

    def dense_ffn(self, x: Array, norm: Array, eps: float, gate: CudaWeight, up: CudaWeight, down: CudaWeight) -> None:
        """See `strata.kernels.ops.Ops.dense_ffn`."""
        activation = self._gated(self._split(x, norm, eps), x, gate, up, None)
        self.project_add(activation, down, x)

    def shared_ffn(
        self,
        hidden: Array,
        share: Array | None,
        gate: CudaWeight,
        up: CudaWeight,
        down: CudaWeight,
        residual: Array,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `strata.kernels.ops.Ops.shared_ffn`; `hidden` has the split rows that `route` made."""
        shares = None
        if share is not None:
            shares = self._scratch["share"]
            self._dense(self._hidden, hidden, [_Matrix.of(CudaWeight(share, "F32", 1, len(share)), shares)])
        self.project_add(self._gated(self._hidden, hidden, gate, up, shares), down, residual, scale=scale)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: tuple[Array, Array] | None,
        eps: float,
        rope: Rope,
        position: Array,
        kv: KvLayer,
        scale: float,
        out: Array,
    ) -> None:
        """See `strata.kernels.ops.Ops.attention`; `q` is left as it is."""
        tokens, heads, size = q.shape
        groups = k.shape[1]
        prepared = heads_of(q, k, v, norms, eps, rope)
        neox = str(rope.style is RopeStyle.NEOX).lower()
        half = kv.keys.dtype.itemsize == 2
        cell, keys, values = cells_of(kv)
        grid = (-(-2 * groups // 4), tokens)
        self._ops.launch("attention", f"append<{size},{neox},{cell}>", grid, 128, prepared, position, keys, values)
        # As `Cells` in cuda/prompt_attention.cu.
        halves = 1 if half else 2
        cells = 16 if size > 128 else 32 if size * halves > 128 else 64
        warps = 2 if size > 128 else 4
        queries, tile = 4 * 16 * warps * size, 2 * 2 * halves * cells * size
        stages = 2 if half and self._copies_ahead and queries + 2 * tile <= self._shared else 1
        self._ops.launch(
            "prompt_attention",
            f"prompt_attend<{size},{neox},{cell},{stages}>",
            (-(-tokens * (heads // groups) // (16 * warps)), groups),
            warps * 32,
            *(prepared, position, keys, values, scale, out, tokens),
            shared=queries + stages * tile,
        )

    def route(
        self,
        x: Array,
        norm: Array,
        eps: float,
        router: CudaWeight,
        normalise: bool,
        hidden: Array,
        ids: Array,
        weights: Array,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `strata.kernels.ops.Ops.route`; `hidden` becomes split rows."""
        tokens, count = len(x), router.rows
        self._split(x, norm, eps, self._hidden)
        logits = self._scratch["logits"]
        self._dense(self._hidden, x, [_Matrix.of(router, logits)])
        choice = choice_of(logits, None, ids, ids, weights, experts=count, normalise=normalise, scale=scale)
        grid = (-(-tokens // _ROUTE_WARPS),)
        self._ops.launch("route", f"choose_rows<{-(-count // 32)}>", grid, 32 * _ROUTE_WARPS, choice, tokens)

    def experts_add(self, pool: CudaSlots, ids: Array, weights: Array, residual: Array, counts: Array) -> None:
        """Add the weighted experts that `route` chose for the rows that it normed.

        ids int32 and weights float32 [T, K], residual [T, E]; `counts` int32 [N] becomes how many tokens each of the N
        experts has. Expert i is in slot i of `pool`. The sum over ranks is in rank order.
        """
        tokens, top_k = ids.shape
        experts = len(counts)
        embedding, pairs = residual.shape[1], tokens * top_k
        width = self._width
        rows = self._tile_rows(pairs / experts)
        sort = ("pairs", "tiles", "tile_count", "counters", "firsts")
        order, tile_of, tile_count, counters, firsts = (self._scratch[name] for name in sort)
        self._ops.launch(
            "prompt",
            "sort_experts",
            (-(-experts // _SORT_WARPS),),
            32 * _SORT_WARPS,
            *(ids, None, pairs, experts, rows, order, counts, firsts, tile_of, tile_count, counters),
        )
        results = self._scratch["results"]
        activation = results[: pairs * width].reshape(pairs, width)
        tiles = _Tiles(rows, tile_of, tile_count, pairs // rows + min(experts, pairs), pool.stride)
        base = int(pool.data.data.ptr)
        gate, up = (_Matrix(pool.gate_type, base + offset, width, activation) for offset in (pool.gate, pool.up))
        self._product(self._hidden, pairs, embedding, [gate, up], tiles=tiles, gated=True, sources=order, divide=top_k)
        down = _Matrix(pool.down_type, base + pool.down, embedding, results)
        self._product(self._split(activation), pairs, width, [down], tiles=tiles, to=order)
        grid = (-(-embedding // (4 * 128)), tokens)
        self._ops.launch("prompt", "combine", grid, 128, results, weights, residual, embedding, top_k)

    def head(self, x: Array, norm: Array, eps: float, weight: CudaWeight, logits: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.head`."""
        self._ops.head(x, norm, eps, weight, logits, scale=scale)

    def _gated(self, rows: _Split, x: Array, gate: CudaWeight, up: CudaWeight, share: Array | None) -> Array:
        """Return ``silu(gate h) * up h``, times sigmoid(share) if given, in scratch that the next call overwrites."""
        activation = self._scratch["results"][: len(x) * gate.rows].reshape(len(x), gate.rows)
        if gate.type == up.type:
            matrices = [_Matrix.of(weight, activation) for weight in (gate, up)]
            self._dense(rows, x, matrices, gated=True, share=share)
            return activation
        ups = self._scratch["results"][activation.size : 2 * activation.size].reshape(activation.shape)
        for weight, out in ((gate, activation), (up, ups)):
            self._dense(rows, x, [_Matrix.of(weight, out)])
        self._ops.gate(activation, ups, share)
        return activation

    def _split(self, x: Array, norm: Array | None = None, eps: float = 0.0, into: _Split | None = None) -> _Split:
        """Split the rows of `x`, normed if `norm` is given, into scratch that the next call overwrites."""
        into = into or _Split(*(self._scratch[name] for name in ("split", "split_sums", "split_scales")))
        count, columns = x.shape
        grid = (-(-count // _SPLIT_WARPS),)
        arguments = (x, norm, eps, columns, count, into.x, into.sums, into.scales)
        self._ops.launch("prompt", "split_rows", grid, 32 * _SPLIT_WARPS, *arguments)
        return into

    def _dense(self, rows: _Split, x: Array, matrices: Sequence[_Matrix], **options: Any) -> None:
        """Multiply all rows, which were made of `x`, by matrices of one type."""
        count, columns = x.shape
        blocks = sum(-(-matrix.rows // _RESULTS) for matrix in matrices)
        tile = self._tile_rows(count)
        while tile > PROMPT_TILE_ROWS[0] and blocks * -(-count // tile) < self._ops.processors:
            tile //= 2
        self._product(rows, count, columns, matrices, tiles=_Tiles(tile), **options)

    def _product(
        self,
        rows: _Split,
        count: int,
        columns: int,
        matrices: Sequence[_Matrix],
        *,
        tiles: _Tiles,
        gated: bool = False,
        add: bool = False,
        scale: float = 1.0,
        sources: Array | None = None,
        divide: int = 1,
        to: Array | None = None,
        share: Array | None = None,
    ) -> None:
        arrays = {"tiles": tiles.of, "tile_count": tiles.count, "sources": sources, "to": to, "share": share}
        product = _Product(
            **{name: pointer(array) for name, array in arrays.items()},
            **{name: pointer(getattr(rows, name)) for name in ("x", "sums", "scales")},
            stride=tiles.stride,
            count=len(matrices),
            divide=divide,
            rows=count,
            k=columns,
            add=int(add),
            scale=scale,
        )
        blocks = 0
        for i, matrix in enumerate(matrices):
            first = 0 if gated else blocks
            product.at[i] = _Part(matrix.data, pointer(matrix.out), pointer(matrix.bias), matrix.rows, first)
            blocks += -(-matrix.rows // _RESULTS)
        if gated:
            blocks = -(-matrices[0].rows // (_RESULTS // 2))
        self._ops.launch(
            "prompt_product",
            f"prompt_product<{matrices[0].type},{str(gated).lower()},{tiles.rows}>",
            (blocks, tiles.most or -(-count // tiles.rows)),
            _PRODUCT_THREADS,
            product,
            shared=_shared_bytes(tiles.rows),
        )

    def _tile_rows(self, rows: float) -> int:
        """Return how many rows a tile has where about so many share a matrix."""
        fit = [tile for tile in PROMPT_TILE_ROWS if _shared_bytes(tile) <= self._shared]
        return next((tile for tile in fit if tile >= rows), fit[-1])


def _shared_bytes(tile: int) -> int:
    """Bytes of shared memory that a product of tiles takes at most (two of `Stage` in cuda/prompt_product.cu)."""
    activations, weights = 2 * tile * _STEP_BYTES, _RESULTS * _STEP_BYTES
    scales_and_minima, sums = 2 * 4 * _RESULTS * 4, tile * 4 * 4
    return 2 * (activations + weights + scales_and_minima + sums)
