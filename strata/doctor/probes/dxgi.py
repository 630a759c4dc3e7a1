"""Windows' display adapters through DXGI: what each has, draws, and lets one process use."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from strata.doctor.facts import AdapterFacts, DisplayAdapter
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.pci_vendors import VENDORS

_FACTORY1 = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")  # IDXGIFactory1
_ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd")  # IDXGIAdapter3, from Windows 10 on
_NOT_FOUND = 0x887A0002  # DXGI_ERROR_NOT_FOUND: the list is at its end
_LEAST_CARD = 1 << 30  # bytes
_SOFTWARE = 2  # DXGI_ADAPTER_FLAG_SOFTWARE

# Places in the interfaces' tables of functions.
_QUERY_INTERFACE, _RELEASE = 0, 2
_ENUM_ADAPTERS1 = 12  # IDXGIFactory1
_ENUM_OUTPUTS, _GET_DESC1, _QUERY_VIDEO_MEMORY = 7, 10, 14  # IDXGIAdapter, 1 and 3


class Adapter(NamedTuple):
    """One adapter as DXGI describes it, in bytes; the budget is None before Windows 10."""

    name: str
    vendor: int
    device: int
    dedicated: int
    software: bool
    outputs: int
    budget: int | None


class _Desc1(ctypes.Structure):
    _fields_ = (
        ("description", ctypes.c_uint16 * 128),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("subsystem", ctypes.c_uint32),
        ("revision", ctypes.c_uint32),
        ("dedicated", ctypes.c_size_t),
        ("dedicated_system", ctypes.c_size_t),
        ("shared", ctypes.c_size_t),
        ("luid", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    )


class _VideoMemory(ctypes.Structure):
    _fields_ = (
        ("budget", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


def create_factory(identity: bytes, result: Any) -> int:
    """Call CreateDXGIFactory1."""
    return int(ctypes.CDLL("dxgi").CreateDXGIFactory1(identity, result))


def adapters(create_factory: Callable[[bytes, Any], int] = create_factory) -> Iterator[Adapter]:
    """Yield every display adapter.

    Parameters
    ----------
    create_factory : callable
        Writes an IDXGIFactory1 to the pointer that it is given, and returns the call's result.

    Raises
    ------
    Unknown
        When DXGI refuses.
    """
    factory = ctypes.c_void_p()
    _succeed("CreateDXGIFactory1", create_factory(_FACTORY1.bytes_le, ctypes.byref(factory)))
    for adapter in _listed(factory, _ENUM_ADAPTERS1):
        desc = _Desc1()
        _succeed("GetDesc1", _call(adapter, _GET_DESC1, ctypes.byref(desc)))
        yield Adapter(
            name=bytes(desc.description).decode("utf-16-le").rstrip("\0"),
            vendor=desc.vendor,
            device=desc.device,
            dedicated=desc.dedicated,
            software=bool(desc.flags & _SOFTWARE),
            outputs=sum(1 for _ in _listed(adapter, _ENUM_OUTPUTS)),
            budget=_budget(adapter),
        )
    _call(factory, _RELEASE)


def _call(interface: ctypes.c_void_p, place: int, *arguments: Any) -> int:
    """Call a function of a COM interface and return its HRESULT, unsigned."""
    table = ctypes.cast(interface, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(table[place])
    return int(function(interface, *arguments)) & 0xFFFFFFFF


def _succeed(call: str, result: int) -> None:
    if result & 0x8000_0000:
        raise Unknown(f"{call} returned 0x{result & 0xFFFFFFFF:08X}")


def _listed(interface: ctypes.c_void_p, place: int) -> Iterator[ctypes.c_void_p]:
    """Yield each object that an enumerating function gives; each is released when the next is asked for."""
    number = 0
    while True:
        item = ctypes.c_void_p()
        result = _call(interface, place, ctypes.c_uint32(number), ctypes.byref(item))
        if result == _NOT_FOUND:
            return
        _succeed("enumerating", result)
        yield item
        _call(item, _RELEASE)
        number += 1


def _budget(adapter: ctypes.c_void_p) -> int | None:
    """Return how much of the adapter's own memory one process may use now."""
    newer = ctypes.c_void_p()
    if _call(adapter, _QUERY_INTERFACE, _ADAPTER3.bytes_le, ctypes.byref(newer)) & 0x8000_0000:
        return None
    info = _VideoMemory()
    own_memory = ctypes.c_uint32(0)  # DXGI_MEMORY_SEGMENT_GROUP_LOCAL
    result = _call(newer, _QUERY_VIDEO_MEMORY, ctypes.c_uint32(0), own_memory, ctypes.byref(info))
    _call(newer, _RELEASE)
    return None if result & 0x8000_0000 else int(info.budget)


def adapter_facts(listed: list[Adapter]) -> AdapterFacts:
    """Return DXGI's adapters as facts; Windows' software renderer is none."""
    return AdapterFacts(
        adapters=tuple(_facts(adapter) for adapter in listed if not adapter.software),
        sources={"adapters": "DXGI", "adapters.displays": "IDXGIAdapter.EnumOutputs"},
    )


def _integrated(vendor: str | None, dedicated: int) -> bool | None:
    """Return whether an adapter is a part of the processor, by the memory set aside for it; None where that may be.

    The firmware sets 128 to 512 MiB aside for a processor's graphics by default; no card of these makers that runs
    today's drivers has less than a gigabyte. Much may be set aside for AMD's, as much as a card has.
    """
    if vendor in ("Intel", "AMD", "Qualcomm") and dedicated < _LEAST_CARD:
        return True
    return False if vendor in ("NVIDIA", "Intel") and dedicated >= _LEAST_CARD else None


def _facts(adapter: Adapter) -> DisplayAdapter:
    unknown = {"pci_bus_id": "DXGI does not show it"}
    integrated = _integrated(VENDORS.get(adapter.vendor), adapter.dedicated)
    if integrated is None:
        unknown["integrated"] = "DXGI shows only how much memory is its own, which does not tell here"
    if adapter.budget is None:
        unknown["budget_bytes"] = "this Windows has no IDXGIAdapter3"
    return DisplayAdapter(
        vendor=VENDORS.get(adapter.vendor) or f"{adapter.vendor:04x}",
        name=adapter.name,
        pci_id=f"{adapter.vendor:04x}:{adapter.device:04x}",
        integrated=integrated,
        displays=adapter.outputs,
        vram_total_bytes=adapter.dedicated,
        budget_bytes=adapter.budget,
        unknown=unknown,
    )
