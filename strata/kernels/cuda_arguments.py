"""What kernels take besides arrays and numbers: structures as the sources in cuda/ declare them."""

from __future__ import annotations

import ctypes
from typing import Any

from strata.kernels.launch import Argument
from strata.kernels.ops import Array, KvLayer, Rope

_KV_CELLS = {"float16": "KvF16", "float32": "KvF32", "int8": "KvInt8"}  # of cuda/kv.cuh


class Segment(ctypes.Structure):
    """A weight of a projection: `Segment` of cuda/project.cu."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("tile", ctypes.c_int),
        ("first_block", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class Segments(ctypes.Structure):
    """All weights of a projection."""

    _fields_ = (("at", Segment * 4), ("count", ctypes.c_int), ("blocks", ctypes.c_int))


class NormedRows(ctypes.Structure):
    """Rows of cuda/norm.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class NormedPair(ctypes.Structure):
    """One or two of them."""

    _fields_ = (("at", NormedRows * 2),)


class Heads(ctypes.Structure):
    """`Heads` of cuda/heads.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_norm", "k_norm", "frequencies")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("dims", "heads", "kv_heads")),
    )


class Cells(ctypes.Structure):
    """Keys or values of an int8 KV cache: `KvInt8::Cache` of cuda/kv.cuh."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class ExpertPool(ctypes.Structure):
    """`ExpertPool` of cuda/experts.cu."""

    _fields_ = tuple(
        (name, ctypes.c_uint64 if name != "base" else ctypes.c_void_p)
        for name in ("base", "stride", "gate", "up", "down")
    )


class Choice(ctypes.Structure):
    """`Choice` of cuda/route.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "slot_of", "ids", "slots", "weights")),
        *((name, ctypes.c_int) for name in ("n", "top_k", "normalise")),
        ("scale", ctypes.c_float),
    )


class Residency(ctypes.Structure):
    """`Residency` of cuda/residency.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("slot_of", "owner", "use", "calls", "source", "counts", "wanted", "base")
        ),
        *((name, ctypes.c_uint64) for name in ("stride", "bytes")),
        *((name, ctypes.c_int) for name in ("slots", "experts", "layer", "policy")),
    )


class Planes(ctypes.Structure):
    """`Planes` of cuda/layout.cu."""

    _fields_ = (
        ("offset", ctypes.c_int * 5),
        ("size", ctypes.c_int * 5),
        ("start", ctypes.c_int * 5),
        ("count", ctypes.c_int),
        ("block", ctypes.c_int),
    )


def heads_of(
    q: Array, k: Array, v: Array, norms: tuple[Array, Array] | None, eps: float, rope: Rope
) -> ctypes.Structure:
    """Return what attention's kernels take of how heads are prepared: arguments of `CudaOps.attention`."""
    arrays = (q, k, v, *(norms or (None, None)), rope.inverse_frequencies)
    return Heads(*(pointer(each) for each in arrays), eps, rope.dims, q.shape[1], k.shape[1])


def cells_of(kv: KvLayer) -> tuple[str, Any, Any]:
    """Return how attention's kernels name a KV cache's type, and what they take of keys and values."""
    return _KV_CELLS[kv.keys.dtype.name], _cells(kv.keys, kv.key_scales), _cells(kv.values, kv.value_scales)


def choice_of(
    logits: Array,
    slot_of: Array | None,
    ids: Array,
    slots: Array,
    weights: Array,
    *,
    experts: int,
    normalise: bool,
    scale: float,
) -> ctypes.Structure:
    """Return what the router's kernels take; see `CudaOps.route`."""
    pointers = (pointer(each) for each in (logits, slot_of, ids, slots, weights))
    return Choice(*pointers, experts, ids.shape[1], int(normalise), scale)


def _cells(cells: Array, scales: Array | None) -> Argument:
    return ctypes.c_void_p(pointer(cells)) if scales is None else Cells(pointer(cells), pointer(scales))


def pointer(array: Array | None) -> int:
    """Return the address of an array on the device, 0 of none."""
    return 0 if array is None else int(array.data.ptr)
