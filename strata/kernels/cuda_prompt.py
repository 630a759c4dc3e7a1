"""The ops for the many tokens of a prompt: products on the matrix units, straight from quantised blocks.

Activations go to the matrix units in two halves, which are made once per matrix product ("split rows", see
``cuda/prompt.cu``). Tiles follow from shapes; which tile a row lies in changes no bit of its result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy

from strata.kernels.cuda_layout import PROMPT_TILE_ROWS
from strata.kernels.cuda_ops import CudaOps, CudaSlots, CudaWeight, choice_of, heads_of
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
        ("rows", ctypes.c_int),
        ("first_block", ctypes.c_int),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("at", _Part * _PARTS),
        ("tiles", ctypes.c_void_p),
        ("tile_count", ctypes.c_void_p),
        ("stride", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("x", "sums", "scales", "sources", "to")),
        *((name, ctypes.c_int) for name in ("count", "divide", "rows", "k", "add")),
    )


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
        See `strata.gguf.cuda_footprint.prompt_workspace`.
    """

    def __init__(self, ops: CudaOps, scratch: Mapping[str, Array]) -> None:
        self._ops = ops
        self._scratch = scratch
        device = cupy.cuda.Device()
        self._shared = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
        self._processors = int(device.attributes["MultiProcessorCount"])
        self._copies_ahead = int(device.compute_capability) >= 80
        self._hidden = _Split(*(scratch[name] for name in ("hidden", "hidden_sums", "hidden_scales")))

    def embed(self, table: CudaWeight, tokens: Array, out: Array) -> None:
        """See `strata.kernels.ops.Ops.embed`."""
        self._ops.embed(table, tokens, out)

    def norm_project(
        self, x: Array, norm: Array, eps: float, weights: Sequence[CudaWeight], outs: Sequence[Array]
    ) -> None:
        """See `strata.kernels.ops.Ops.norm_project`."""
        rows = self._split(x, norm, eps)
        for type_ in dict.fromkeys(weight.type for weight in weights):
            same = [(weight, out) for weight, out in zip(weights, outs, strict=True) if weight.type == type_]
            for start in range(0, len(same), _PARTS):
                self._dense(rows, len(x), same[start : start + _PARTS])

    def project_add(self, x: Array, weight: CudaWeight, residual: Array) -> None:
        """See `strata.kernels.ops.Ops.project_add`."""
        self._dense(self._split(x), len(x), [(weight, residual)], add=True)

    def dense_ffn(self, x: Array, norm: Array, eps: float, gate: CudaWeight, up: CudaWeight, down: CudaWeight) -> None:
        """See `strata.kernels.ops.Ops.dense_ffn`."""
        activation = self._scratch["results"][: len(x) * gate.rows].reshape(len(x), gate.rows)
        rows = self._split(x, norm, eps)
        if gate.type == up.type:
            self._dense(rows, len(x), [(gate, activation), (up, activation)], gated=True)
        else:
            ups = self._scratch["results"][activation.size : 2 * activation.size].reshape(activation.shape)
            for weight, out in ((gate, activation), (up, ups)):
                self._dense(rows, len(x), [(weight, out)])
            count = int(activation.size)
            self._ops.launch("project", "gated", (-(-count // 256),), 256, activation, ups, count)
        self._dense(self._split(activation), len(x), [(down, x)], add=True)

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
        half = kv.keys.dtype == cupy.float16
        cell = "KvF16" if half else "KvF32"
        grid = (-(-2 * groups // 4), tokens)
        self._ops.launch(
            "attention", f"append<{size},{neox},{cell}>", grid, 128, prepared, position, kv.keys, kv.values
        )
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
            *(prepared, position, kv.keys, kv.values, scale, out, tokens),
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
    ) -> None:
        """See `strata.kernels.ops.Ops.route`; `hidden` becomes split rows."""
        tokens, count = len(x), router.rows
        self._split(x, norm, eps, self._hidden)
        logits = self._scratch["logits"]
        self._dense(self._hidden, tokens, [(router, logits)])
        choice = choice_of(logits, None, ids, ids, weights, count, normalise)
        grid = (-(-tokens // _ROUTE_WARPS),)
        self._ops.launch("route", f"choose_rows<{-(-count // 32)}>", grid, 32 * _ROUTE_WARPS, choice, tokens)

    def experts_add(
        self, pool: CudaSlots, experts: int, ids: Array, weights: Array, residual: Array, counts: Array
    ) -> None:
        """Add the weighted experts that `route` chose for the rows that it normed.

        ids int32 and weights float32 [T, K], residual [T, E]; `counts` int32 [N] becomes how many tokens each of the
        `experts` has. Expert i is in slot i of `pool`. The sum over ranks is in rank order.
        """
        tokens, top_k = ids.shape
        embedding, pairs = residual.shape[1], tokens * top_k
        width = self._scratch["expert_width"]
        rows = self._tile_rows(pairs / experts)
        tiles = pairs // rows + min(experts, pairs)
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
        common = {"tiles": tile_of, "tile_count": tile_count, "stride": pool.stride, "most_tiles": tiles, "tile": rows}
        base = int(pool.data.data.ptr)
        gated = [(base + pool.gate, width, activation), (base + pool.up, width, activation)]
        self._product(
            pool.gate_type, self._hidden, pairs, embedding, gated, gated=True, sources=order, divide=top_k, **common
        )
        down = [(base + pool.down, embedding, results)]
        self._product(pool.down_type, self._split(activation), pairs, width, down, to=order, **common)
        grid = (-(-embedding // (4 * 128)), tokens)
        self._ops.launch("prompt", "combine", grid, 128, results, weights, residual, embedding, top_k)

    def head(self, x: Array, norm: Array, eps: float, weight: CudaWeight, logits: Array) -> None:
        """See `strata.kernels.ops.Ops.head`."""
        self._ops.head(x, norm, eps, weight, logits)

    def _split(self, x: Array, norm: Array | None = None, eps: float = 0.0, into: _Split | None = None) -> _Split:
        """Split the rows of `x`, normed if `norm` is given, into scratch that the next call overwrites."""
        into = into or _Split(*(self._scratch[name] for name in ("split", "split_sums", "split_scales")))
        count, columns = x.shape
        grid = (-(-count // _SPLIT_WARPS),)
        arguments = (x, norm, eps, columns, count, into.x, into.sums, into.scales)
        self._ops.launch("prompt", "split_rows", grid, 32 * _SPLIT_WARPS, *arguments)
        return into

    def _dense(
        self,
        rows: _Split,
        count: int,
        weights: Sequence[tuple[CudaWeight, Array]],
        *,
        add: bool = False,
        gated: bool = False,
    ) -> None:
        """Multiply all rows by weights of one type."""
        parts = [(int(weight.data.data.ptr), weight.rows, out) for weight, out in weights]
        first = weights[0][0]
        blocks = sum(-(-weight.rows // _RESULTS) for weight, _ in weights)
        tile = self._tile_rows(count)
        while tile > PROMPT_TILE_ROWS[0] and blocks * -(-count // tile) < self._processors:
            tile //= 2
        self._product(first.type, rows, count, first.columns, parts, gated=gated, add=add, tile=tile)

    def _product(
        self,
        type_: str,
        rows: _Split,
        count: int,
        columns: int,
        weights: Sequence[tuple[int, int, Array]],  # address, rows, results
        *,
        tile: int,
        gated: bool = False,
        add: bool = False,
        sources: Array | None = None,
        divide: int = 1,
        to: Array | None = None,
        tiles: Array | None = None,
        tile_count: Array | None = None,
        stride: int = 0,
        most_tiles: int = 0,
    ) -> None:
        pointers = {"tiles": tiles, "tile_count": tile_count, "sources": sources, "to": to}
        product = _Product(
            **{name: 0 if array is None else int(array.data.ptr) for name, array in pointers.items()},
            **{name: int(getattr(rows, name).data.ptr) for name in ("x", "sums", "scales")},
            stride=stride,
            count=len(weights),
            divide=divide,
            rows=count,
            k=columns,
            add=int(add),
        )
        blocks = 0
        for i, (address, length, out) in enumerate(weights):
            product.at[i] = _Part(address, int(out.data.ptr), length, 0 if gated else blocks)
            blocks += -(-length // _RESULTS)
        if gated:
            blocks = -(-weights[0][1] // (_RESULTS // 2))
        self._ops.launch(
            "prompt_product",
            f"prompt_product<{type_},{str(gated).lower()},{tile}>",
            (blocks, most_tiles or -(-count // tile)),
            _PRODUCT_THREADS,
            product,
            shared=_shared_bytes(tile),
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


