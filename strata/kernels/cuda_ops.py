"""The ops on a CUDA device: which kernel each one is, with which tiles, grid and scratch.

What changes from token to token (tokens, position, slots) lies in device memory, so a captured step can be replayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy

from strata.kernels.compile import Kernel, compile_kernels
from strata.kernels.cuda_layout import LAYOUTS, Tile
from strata.kernels.launch import Argument, LoadedKernel
from strata.kernels.ops import Array, KvLayer, Rope, RopeStyle

SPLITS = 32  # of the KV cache in attention, at most
_WARP = 32
_MAX_THREADS = 512
_TOKENS = 4  # tokens that one pass over a weight serves


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """A matrix [rows, columns] in device memory, quantised as `type`, in the layout of `cuda_layout`."""

    data: Array
    type: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class CudaSlots:
    """A layer's pool of experts: gate, up and down of slot s start at ``s * stride`` plus these offsets."""

    data: Array
    stride: int
    gate: int
    up: int
    down: int
    gate_type: str
    up_type: str
    down_type: str


class _Segment(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("tile", ctypes.c_int),
        ("first_block", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class _Segments(ctypes.Structure):
    _fields_ = (("at", _Segment * 4), ("count", ctypes.c_int), ("blocks", ctypes.c_int))


class _Pool(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64 if name != "base" else ctypes.c_void_p)
        for name in ("base", "stride", "gate", "up", "down")
    )


class _Planes(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int * 5),
        ("size", ctypes.c_int * 5),
        ("start", ctypes.c_int * 5),
        ("count", ctypes.c_int),
        ("block", ctypes.c_int),
    )


class CudaOps:
    """`strata.kernels.ops.Ops` on the current CUDA device and CuPy's current stream.

    `position` is an int32 [1] on the device, `slots` an int32 [T, K] that `route` writes.

    Parameters
    ----------
    scratch : mapping of str to Array
        ``partial`` float32 (see `partial_size`), ``counters`` uint32 zeros, ``logits`` float32 [T, N],
        ``activation`` float32 [T * K, F].
    cache : Path, optional
        Where compiled kernels are kept.
    """

    def __init__(self, scratch: Mapping[str, Array], cache: Path | None = None) -> None:
        device = cupy.cuda.Device()
        self._arch = int(device.compute_capability)
        self._processors = int(device.attributes["MultiProcessorCount"])
        self._scratch = scratch
        self._cache = cache
        self._kernels: dict[Kernel, LoadedKernel] = {}
        self._wanted: set[Kernel] | None = None

    def prepare(self, step: Callable[[], None], progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Compile and load, in parallel, all kernels that `step` launches; nothing is launched."""
        self._wanted = set()
        try:
            step()
            wanted = self._wanted
        finally:
            self._wanted = None
        compiled = compile_kernels(sorted(wanted - self._kernels.keys()), self._arch, self._cache, progress)
        self._kernels |= {kernel: LoadedKernel(found, self._arch >= 90) for kernel, found in compiled.items()}

    def embed(self, table: CudaWeight, tokens: Array, out: Array) -> None:
        """See `strata.kernels.ops.Ops.embed`."""
        self._gather(table, tokens, len(tokens), out)

    def dequantise(self, weight: CudaWeight, out: Array) -> None:
        """Write all of `weight` as float32 [rows, columns]."""
        self._gather(weight, None, weight.rows, out)

    def to_planes(self, source: int, out: Array, type_: str) -> None:
        """Bring one matrix from the file's order, at address `source`, into the device's; both uint8.

        `source` may be device memory or page-locked host memory that the device can read.
        """
        layout = LAYOUTS[type_]
        if not layout.planes:
            cupy.cuda.runtime.memcpyAsync(out.data.ptr, source, out.nbytes, 4, cupy.cuda.get_current_stream().ptr)
            return
        planes = _Planes(count=len(layout.planes), block=layout.nbytes)
        start = 0
        for i, (offset, size) in enumerate(layout.planes):
            planes.offset[i], planes.size[i], planes.start[i] = offset, size, start
            start += size
        blocks = out.nbytes // layout.nbytes
        grid = (-(-out.nbytes // (4 * 256)),)
        self._launch("layout", "to_planes", grid, 256, _address(source), out, ctypes.c_uint64(blocks), planes)

    def norm_project(
        self, x: Array, norm: Array, eps: float, weights: Sequence[CudaWeight], outs: Sequence[Array]
    ) -> None:
        """See `strata.kernels.ops.Ops.norm_project`."""
        self._project(x, norm, eps, weights, outs, add=False)

    def project_add(self, x: Array, weight: CudaWeight, residual: Array) -> None:
        """See `strata.kernels.ops.Ops.project_add`."""
        self._project(x, None, 0.0, [weight], [residual], add=True)

    def head(self, x: Array, norm: Array, eps: float, weight: CudaWeight, logits: Array) -> None:
        """See `strata.kernels.ops.Ops.head`."""
        self._project(x, norm, eps, [weight], [logits], add=False)

    def rope_append(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: tuple[Array, Array] | None,
        eps: float,
        rope: Rope,
        position: Array,
        kv: KvLayer,
    ) -> None:
        """See `strata.kernels.ops.Ops.rope_append`."""
        tokens, heads, size = q.shape
        groups = k.shape[1]
        q_norm, k_norm = norms or (None, None)
        neox = str(rope.style is RopeStyle.NEOX).lower()
        self._launch(
            "attention",
            f"rope_append<{size},{neox},{_cell(kv.keys)}>",
            (-(-(heads + 2 * groups) // 4), tokens),
            128,
            *(q, k, v, q_norm, k_norm, eps, rope.inverse_frequencies, rope.dims, position, heads, groups),
            *(kv.keys, kv.values),
        )

    def attend(self, q: Array, kv: KvLayer, position: Array, scale: float, out: Array) -> None:
        """See `strata.kernels.ops.Ops.attend`."""
        tokens, heads, size = q.shape
        groups = kv.keys.shape[1]
        together = heads_together(heads, groups)
        self._launch(
            "attention",
            f"attend<{size},{together},{_cell(kv.keys)}>",
            (SPLITS, heads // together, tokens),
            256,
            *(q, kv.keys, kv.values, position, scale, heads, groups, out),
            *(self._scratch["partial"], self._scratch["counters"]),
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
        slots: Array,
        slot_of: Array | None = None,
    ) -> None:
        """See `strata.kernels.ops.Ops.route`; `slots` [T, K] becomes `slot_of` of `ids`, or `ids` itself."""
        tokens, embedding = x.shape
        tile = Tile.of(router.type, embedding)
        together = min(tokens, _TOKENS)
        per_lane = -(-router.rows // _WARP)
        self._launch(
            "route",
            f"route<{per_lane},{together},{tile}>",
            (-(-router.rows * tile.lanes // 128),),
            128,
            *(router.data, x, norm, eps, embedding, router.rows, tokens, ids.shape[1], int(normalise), slot_of),
            *(hidden, self._scratch["logits"], self._scratch["counters"], ids, slots, weights),
            shared=_staged(embedding, together),
        )

    def experts_add(self, hidden: Array, pool: CudaSlots, slots: Array, weights: Array, residual: Array) -> None:
        """Add the weighted experts: ``residual[t] += sum over ranks of weights[t, r] * down(silu(gate) * up)``.

        hidden and residual [T, E], slots int32 and weights float32 [T, K]; the sum is in rank order.
        """
        tokens, embedding = hidden.shape
        top_k = slots.shape[1]
        activation = self._scratch["activation"]
        width = activation.shape[-1]
        structure = _Pool(pool.data.data.ptr, pool.stride, pool.gate, pool.up, pool.down)
        gate, up = Tile.of(pool.gate_type, embedding), Tile.of(pool.up_type, embedding)
        threads = 256
        self._launch(
            "experts",
            f"expert_gate_up<{gate},{up}>",
            (-(-width * gate.lanes // threads), tokens * top_k),
            threads,
            *(structure, slots, hidden, activation, embedding, width, top_k),
            shared=_staged(embedding, 1),
        )
        down = Tile.of(pool.down_type, width)
        sets = max(1, 16 // top_k)
        rows = sets * _WARP // down.lanes
        self._launch(
            "experts",
            f"expert_down<{down}>",
            (-(-embedding // rows), tokens),
            sets * top_k * _WARP,
            *(structure, slots, weights, activation, residual, embedding, width, top_k),
            shared=_staged(top_k * width, 1) + 4 * top_k * rows,
        )

    def _project(
        self,
        x: Array,
        norm: Array | None,
        eps: float,
        weights: Sequence[CudaWeight],
        outs: Sequence[Array],
        add: bool,
    ) -> None:
        tokens, columns = x.shape
        tiles = [Tile.of(weight.type, columns) for weight in weights]
        kinds = list(dict.fromkeys(tiles))
        together = min(tokens, _TOKENS)
        # One block a processor where a single wave does it; a large matrix is walked by two.
        lanes = sum(weight.rows * tile.lanes for weight, tile in zip(weights, tiles, strict=True))
        threads = min(_MAX_THREADS, max(128, -(-lanes // self._processors // _WARP) * _WARP))
        segments = _Segments(count=len(weights))
        first = 0
        for i, (weight, tile, out) in enumerate(zip(weights, tiles, outs, strict=True)):
            segments.at[i] = _Segment(weight.data.data.ptr, out.data.ptr, weight.rows, kinds.index(tile), first)
            blocks = -(-weight.rows // (threads // tile.lanes))
            first += min(blocks, 2 * self._processors) if len(weights) == 1 else blocks
        segments.blocks = first
        names = ",".join(map(str, kinds))
        self._launch(
            "project",
            f"project<{str(add).lower()},{together},{names}>",
            (first, -(-tokens // together)),
            threads,
            *(segments, x, norm, eps, columns, tokens),
            shared=_staged(columns, together),
        )

    def _gather(self, table: CudaWeight, rows: Array | None, count: int, out: Array) -> None:
        units = table.columns // LAYOUTS[table.type].unit
        self._launch(
            "embed",
            f"gather_rows<{table.type}>",
            (-(-units // 128), count),
            128,
            *(table.data, rows, out, table.rows, table.columns),
        )

    def _launch(
        self, family: str, expression: str, grid: tuple[int, ...], threads: int, *values: Any, shared: int = 0
    ) -> None:
        kernel = Kernel(family, expression)
        if self._wanted is not None:
            self._wanted.add(kernel)
            return
        if kernel not in self._kernels:
            compiled = compile_kernels([kernel], self._arch, self._cache)[kernel]
            self._kernels[kernel] = LoadedKernel(compiled, self._arch >= 90)
        arguments = [_argument(value) for value in values]
        self._kernels[kernel](grid, threads, arguments, cupy.cuda.get_current_stream().ptr, shared)


def heads_together(heads: int, groups: int) -> int:
    """Return how many query heads of a KV head one block of attention takes: its largest divisor up to 8."""
    each = heads // groups
    return next(r for r in range(min(8, each), 0, -1) if each % r == 0)


def partial_size(tokens: int, heads: int, value_length: int) -> int:
    """Return the floats of the scratch ``partial`` for calls of up to `tokens`."""
    return tokens * heads * SPLITS * (value_length + 2)


def _staged(columns: int, tokens: int) -> int:
    """Bytes of shared memory that `tokens` staged rows take (``staged`` in cuda/gemv.cuh)."""
    padded = columns + columns // 64 * 4
    return 4 * tokens * ((padded + 3) // 4 * 4 + (columns + 15) // 16)


def _cell(cells: Array) -> str:
    return "KvF16" if cells.dtype == cupy.float16 else "KvF32"


def _address(pointer: int) -> Argument:
    return ctypes.c_void_p(pointer)


def _argument(value: Any) -> Argument:
    """Turn a value into what a kernel takes: an array into its address, None into null."""
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, cupy.ndarray):
        return ctypes.c_void_p(value.data.ptr)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    assert isinstance(value, ctypes.Structure | ctypes._SimpleCData)
    return value
