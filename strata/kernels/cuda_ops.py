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
from strata.kernels.cuda_arguments import (
    ExpertPool,
    NormedPair,
    NormedRows,
    Planes,
    Residency,
    Segment,
    Segments,
    cells_of,
    choice_of,
    heads_of,
    pointer,
)
from strata.kernels.cuda_layout import ATTENTION_SPLITS, LAYOUTS, SAMPLE_STRETCH, Tile, staged_bytes
from strata.kernels.launch import Argument, LoadedKernel
from strata.kernels.ops import Array, KvLayer, Rope, RopeStyle
from strata.kernels.residency import MOST_ASKED, Pool, Tables

_FRESH = 8  # most tokens that attention appends by itself (kFresh there)
_WARP = 32
_TILE_ROWS = 16  # of a team of warps (kTileRows in cuda/gemv.cuh)
_ROUTE_THREADS = 128
_GATE_UP_WARPS = 8  # of a block
_DOWN_WARPS = 24  # most of a block that is to keep 80 registers a thread
_STATIC_SHARED = 16 << 10  # most that a kernel has besides the staged activations
_TOKENS = 4  # tokens that one pass over a weight serves
_THREADS = 768  # of a processor, which projections keep busy
_READY_THREADS = 512  # kReadyThreads in cuda/residency.cu
_READY_BLOCKS = 16  # that copy missing experts: enough reads in flight for the fastest link
_WORDS = {16: "uint4", 8: "uint2", 4: "u32", 2: "u16"}


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


class CudaOps:
    """`strata.kernels.ops.Ops` on the current CUDA device and CuPy's current stream.

    `position` is an int32 [1] on the device, `slots` an int32 [T, K] that `route` writes.

    Parameters
    ----------
    scratch : mapping of str to Array
        ``partial`` float32 (see `cuda_layout.partial_size`), ``counters`` uint32 zeros, ``logits`` float32 [T, N],
        ``activation`` float32 [T * K, F]; for a dense model or a shared expert ``gate`` and ``up``, float32 [T, its
        width], and ``share`` float32 [T]; each for the largest T. To sample, ``maxima`` uint32 [V / 64, rounded up].
    cache : Path, optional
        Where compiled kernels are kept.
    """

    def __init__(self, scratch: Mapping[str, Array], cache: Path | None = None) -> None:
        device = cupy.cuda.Device()
        self.arch = self._arch = int(device.compute_capability)
        self.processors = self._processors = int(device.attributes["MultiProcessorCount"])
        self.shared_bytes = int(device.attributes["MaxSharedMemoryPerBlockOptin"])  # most of a block
        self._shared_limit = self.shared_bytes - _STATIC_SHARED
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

    def close(self) -> None:
        """Unload the kernels, none of which may be running."""
        while self._kernels:
            self._kernels.popitem()[1].unload()

    def embed(self, table: CudaWeight, tokens: Array, out: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.embed`."""
        self._gather(table, tokens, len(tokens), out, scale)

    def dequantise(self, weight: CudaWeight, out: Array) -> None:
        """Write all of `weight` as float32 [rows, columns]."""
        self._gather(weight, None, weight.rows, out)

    def to_planes(self, source: int, out: Array, type_: str, first: int = 0, count: int | None = None) -> None:
        """Bring blocks of one matrix from the file's order, at address `source`, into the device's.

        `out` is the whole matrix, uint8; `source` has `count` of its blocks from block `first` on, all by default. It
        may be device memory or page-locked host memory that the device can read.
        """
        layout = LAYOUTS[type_]
        blocks = out.nbytes // layout.nbytes
        count = blocks - first if count is None else count
        nbytes = count * layout.nbytes
        if not layout.planes:
            to = out.data.ptr + first * layout.nbytes
            cupy.cuda.runtime.memcpyAsync(to, source, nbytes, 4, cupy.cuda.get_current_stream().ptr)
            return
        planes = Planes(count=len(layout.planes), block=layout.nbytes)
        start = 0
        for i, (offset, size) in enumerate(layout.planes):
            planes.offset[i], planes.size[i], planes.start[i] = offset, size, start
            start += size
        grid = (-(-nbytes // (4 * 256)),)
        numbers = (ctypes.c_uint64(number) for number in (blocks, first, count))
        self._launch("layout", "to_planes", grid, 256, ctypes.c_void_p(source), out, *numbers, planes)

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
        self._project(x, norm, eps, weights, outs, biases=biases)

    def norm_rows(self, rows: Sequence[Array], norms: Sequence[Array], eps: float) -> None:
        """See `strata.kernels.ops.Ops.norm_rows`."""
        pair = NormedPair()
        for i, (x, norm) in enumerate(zip(rows, norms, strict=True)):
            pair.at[i] = NormedRows(pointer(x), pointer(norm), x.shape[1])
        self._launch("norm", "norm_rows", (len(rows), len(rows[0])), 256, pair, eps)

    def project_add(self, x: Array, weight: CudaWeight, residual: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.project_add`."""
        self._project(x, None, 0.0, [weight], [residual], onto="kResidual", scale=scale)

    def dense_ffn(self, x: Array, norm: Array, eps: float, gate: CudaWeight, up: CudaWeight, down: CudaWeight) -> None:
        """See `strata.kernels.ops.Ops.dense_ffn`."""
        gates, ups = (self._scratch[name][: len(x)] for name in ("gate", "up"))
        self._project(x, norm, eps, [gate, up], [gates, ups])
        self.gate(gates, ups, None)
        self.project_add(gates, down, x)

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
        """See `strata.kernels.ops.Ops.shared_ffn`; s is multiplied in before `down`, not after it."""
        gates, ups, shares = (self._scratch[name][: len(hidden)] for name in ("gate", "up", "share"))
        weights, outs = [gate, up], [gates, ups]
        if share is not None:
            weights.append(CudaWeight(share, "F32", 1, len(share)))
            outs.append(shares)
        self._project(hidden, None, 0.0, weights, outs)
        self.gate(gates, ups, None if share is None else shares)
        self.project_add(gates, down, residual, scale=scale)

    def head(self, x: Array, norm: Array, eps: float, weight: CudaWeight, logits: Array, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.head`."""
        self._project(x, norm, eps, [weight], [logits], scale=scale)

    def sample(self, logits: Array, sampling: Array, token: Array, position: Array, chosen: Array) -> None:
        """Choose the token after `position` from float32 logits [1, V], and go on to it.

        Writes to `chosen` the id, or why there is none (`cuda_layout.NOT_FINITE`, `TOO_MANY`), makes it the next
        `token` and counts `position` up; all int32 [1]. `sampling` has the bytes of a `cuda_layout.Sampling`.
        """
        stretches = -(-logits.shape[-1] // SAMPLE_STRETCH)
        arguments = (logits, logits.shape[-1], self._scratch["maxima"], self._scratch["counters"])
        self._launch(
            "sample", "sample_token", (-(-stretches // 8),), 256, *arguments, sampling, token, position, chosen
        )

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
        together = heads_together(heads, groups, size)
        neox = str(rope.style is RopeStyle.NEOX).lower()
        cell, keys, values = cells_of(kv)
        if tokens > _FRESH:
            grid = (-(-2 * groups // 4), tokens)
            arguments = (prepared, position, keys, values)
            self._launch("attention", f"append<{size},{neox},{cell}>", grid, 128, *arguments)
        self._launch(
            "attention",
            f"attend<{size},{together},{neox},{str(tokens <= _FRESH).lower()},{cell}>",
            (ATTENTION_SPLITS, heads // together, tokens),
            256,
            *(prepared, position, keys, values, scale, out, self._scratch["partial"], self._scratch["counters"]),
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
        slots: Array | None = None,
        slot_of: Array | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `strata.kernels.ops.Ops.route`; `slots` [T, K], if given, becomes `slot_of` of `ids`, or `ids` itself."""
        slots = ids if slots is None else slots
        tokens, embedding = x.shape
        arrays = (self._scratch["logits"], slot_of, ids, slots, weights)
        choice = choice_of(*arrays, experts=router.rows, normalise=normalise, scale=scale)
        together = self._together(tokens, embedding)
        self._launch(
            "route",
            f"route<{together},{router.type},{-(-router.rows // _WARP)}>",
            (-(-router.rows * _WARP // _ROUTE_THREADS),),
            _ROUTE_THREADS,
            *(router.data, x, norm, eps, embedding, tokens, hidden, self._scratch["logits"], self._scratch["counters"]),
            choice,
            shared=staged_bytes(embedding, together),
        )

    def make_ready(self, tables: Tables, pool: Pool, layer: int, ids: Array, slots: Array) -> None:
        """Give every expert of a call a slot, and fill those that were missing; see `numpy_residency.make_ready`."""
        asked = int(ids.size)
        if asked > MOST_ASKED:
            raise ValueError(f"{asked} experts in a call")
        each = (tables.slot_of, pool.owner, tables.use, tables.calls, tables.source, tables.counts, tables.wanted)
        numbers = (pool.stride, pool.nbytes, len(pool.owner), tables.experts, layer, int(tables.policy))
        kept = 4 * len(pool.owner)
        fits = kept <= self._shared_limit
        self._launch(
            "residency",
            f"make_ready<{_WORDS[pool.word]},{str(fits).lower()}>",
            (_READY_BLOCKS,),
            _READY_THREADS,
            *(Residency(*(pointer(table) for table in (*each, pool.data)), *numbers), ids, asked, len(ids), slots),
            self._scratch["counters"],
            shared=kept if fits else 4 * -(-len(pool.owner) // 32),
        )

    def experts_add(
        self,
        hidden: Array,
        pool: CudaSlots,
        slots: Array,
        weights: Array,
        residual: Array,
        readied: tuple[Array, Array] | None = None,
    ) -> None:
        """Add the weighted experts: ``residual[t] += sum over ranks of weights[t, r] * down(silu(gate) * up)``.

        hidden and residual [T, E], slots int32 and weights float32 [T, K]; the sum is in rank order. Right after
        `make_ready`, `readied` are its ids and the layer's part of its `slot_of`: what is there need not wait for it.
        """
        tokens, embedding = hidden.shape
        top_k = slots.shape[1]
        activation = self._scratch["activation"]
        width = activation.shape[-1]
        structure = ExpertPool(pool.data.data.ptr, pool.stride, pool.gate, pool.up, pool.down)
        if pool.gate_type != pool.up_type:
            raise ValueError(f"gate is {pool.gate_type} and up {pool.up_type}")
        ids, slot_of = readied or (None, None)
        tile = Tile.of(pool.gate_type, embedding)
        teams = max(1, _GATE_UP_WARPS // tile.warps)
        self._launch(
            "experts",
            f"expert_gate_up<{tile},{teams}>",
            (-(-width // (8 * teams)), tokens * top_k),
            teams * tile.warps * _WARP,
            *(structure, slots, slot_of, ids, hidden, activation, embedding, width, top_k),
            shared=staged_bytes(embedding, 1),
        )
        tile = Tile.of(pool.down_type, width, most_warps=max(1, min(16, _DOWN_WARPS // top_k)))
        threads = top_k * tile.warps * _WARP
        self._launch(
            "experts",
            f"expert_down<{tile},{threads}>",
            (-(-embedding // _TILE_ROWS), tokens),
            threads,
            *(structure, slots, weights, activation, residual, embedding, width, top_k),
            shared=staged_bytes(top_k * width, 1) + 4 * top_k * tile.warps * _TILE_ROWS,
        )

    def launch(
        self, family: str, expression: str, grid: tuple[int, ...], threads: int, *values: Any, shared: int = 0
    ) -> None:
        """Launch a kernel of ``cuda/<family>.cu`` with `shared` bytes of dynamic shared memory."""
        self._launch(family, expression, grid, threads, *values, shared=shared)

    def _project(
        self,
        x: Array,
        norm: Array | None,
        eps: float,
        weights: Sequence[CudaWeight],
        outs: Sequence[Array],
        *,
        onto: str = "kNothing",
        biases: Sequence[Array] | None = None,
        scale: float = 1.0,
    ) -> None:
        tokens, columns = x.shape
        tiles = [Tile.of(weight.type, columns) for weight in weights]
        kinds = list(dict.fromkeys(tiles))
        together = self._together(tokens, columns)
        writers = -(-_TILE_ROWS * together // _WARP)  # warps, of which each thread writes one sum
        threads = max(writers, *(tile.warps for tile in kinds)) * _WARP
        blocks = [-(-weight.rows // _TILE_ROWS) for weight in weights]
        # A large matrix is walked by the blocks that fit at once, which then read the activations once.
        fit = self._processors * max(1, _THREADS // threads)
        walks = len(weights) == 1 and blocks[0] > 4 * fit
        segments = Segments(count=len(weights), blocks=fit if walks else sum(blocks))
        first = 0
        for i, (weight, tile, out) in enumerate(zip(weights, tiles, outs, strict=True)):
            bias = 0 if biases is None else pointer(biases[i])
            segments.at[i] = Segment(weight.data.data.ptr, out.data.ptr, bias, weight.rows, kinds.index(tile), first)
            first += blocks[i]
        flags = f"{onto if biases is None else 'kBias'},{str(walks).lower()}"
        self._launch(
            "project",
            f"project<{flags},{together},{threads},{','.join(map(str, kinds))}>",
            (segments.blocks, -(-tokens // together)),
            threads,
            *(segments, x, norm, eps, scale, columns, tokens),
            shared=staged_bytes(columns, together),
        )

    def _together(self, tokens: int, columns: int) -> int:
        """Return how many tokens' activations one block stages."""
        together = min(tokens, _TOKENS)
        while together > 1 and staged_bytes(columns, together) > self._shared_limit:
            together -= 1
        return together

    def gate(self, gates: Array, ups: Array, share: Array | None) -> None:
        """Make ``gates = silu(gates) * ups``, times ``sigmoid(share)`` of each row if given."""
        numbers = int(gates.size), int(gates.shape[1])
        self._launch("project", "gated", (-(-gates.size // 256),), 256, gates, ups, share, *numbers)

    def _gather(self, table: CudaWeight, rows: Array | None, count: int, out: Array, scale: float = 1.0) -> None:
        units = table.columns // LAYOUTS[table.type].unit
        self._launch(
            "embed",
            f"gather_rows<{table.type}>",
            (-(-units // 128), count),
            128,
            *(table.data, rows, out, table.rows, table.columns, scale),
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


def heads_together(heads: int, groups: int, size: int) -> int:
    """Return how many query heads of a KV head one block of attention takes: a divisor, 1024 floats at most."""
    each = heads // groups
    return next(r for r in range(min(8, each, 1024 // size), 0, -1) if each % r == 0)


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
