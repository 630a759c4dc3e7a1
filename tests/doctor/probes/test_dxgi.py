"""DXGI's calls, made on objects laid out in memory as COM lays them out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from strata.doctor.facts import DisplayAdapter
from strata.doctor.probes import dxgi
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.dxgi import Adapter, adapter_facts, adapters

GIB = 1 << 30
NOT_FOUND = ctypes.c_int32(0x887A0002).value
NO_INTERFACE = ctypes.c_int32(0x80004002).value
POINTER, NUMBER, RESULT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32


class ComObject:
    """A COM object: a pointer to a table of functions. Counts how often it was given out and released."""

    def __init__(self, functions: dict[int, tuple[Callable[..., int], tuple[Any, ...]]]) -> None:
        self.references = 0
        self._kept = {2: self._function(self._release, ())}
        self._kept |= {place: self._function(call, types) for place, (call, types) in functions.items()}
        self._table = (POINTER * 32)()
        for place, function in self._kept.items():
            self._table[place] = ctypes.cast(function, POINTER)
        self._pointer = POINTER(ctypes.addressof(self._table))

    def _function(self, call: Callable[..., int], types: tuple[Any, ...]) -> Any:
        return ctypes.CFUNCTYPE(RESULT, POINTER, *types)(lambda this, *arguments: call(*arguments))

    def _release(self) -> int:
        self.references -= 1
        return self.references

    def give(self, target: int) -> int:
        self.references += 1
        POINTER.from_address(target).value = ctypes.addressof(self._pointer)
        return 0


def listing(items: list[ComObject]) -> tuple[Callable[[int, int], int], tuple[Any, ...]]:
    return (lambda n, target: items[n].give(target) if n < len(items) else NOT_FOUND), (NUMBER, POINTER)


def fake_adapter(name: str, vendor: int, dedicated: int, outputs: int, budget: int | None, flags: int = 0) -> ComObject:
    def describe(target: int) -> int:
        desc = dxgi._Desc1.from_address(target)
        text = name.encode("utf-16-le")
        ctypes.memmove(target, text + b"\0\0", len(text) + 2)
        desc.vendor, desc.device, desc.dedicated, desc.flags = vendor, 0x2D04, dedicated, flags
        return 0

    def query_memory(node: int, segment: int, target: int) -> int:
        assert (node, segment) == (0, 0)
        dxgi._VideoMemory.from_address(target).budget = budget
        return 0

    def query_interface(identity: int, target: int) -> int:
        if budget is None or ctypes.string_at(identity, 16) != dxgi._ADAPTER3.bytes_le:
            return NO_INTERFACE
        return made[0].give(target)

    functions = {
        0: (query_interface, (POINTER, POINTER)),
        7: listing([ComObject({}) for _ in range(outputs)]),
        10: (describe, (POINTER,)),
        14: (query_memory, (NUMBER, NUMBER, POINTER)),
    }
    made = [ComObject(functions)]
    return made[0]


def test_adapters_are_read_and_released() -> None:
    listed = [
        fake_adapter("NVIDIA GeForce RTX 5060 Ti", 0x10DE, 16 * GIB, 0, 15 * GIB),
        fake_adapter("Intel(R) UHD Graphics 770", 0x8086, 128 << 20, 2, None),
        fake_adapter("Microsoft Basic Render Driver", 0x1414, 0, 0, None, flags=2),
    ]
    factory = ComObject({12: listing(listed)})

    def create(identity: bytes, result: Any) -> int:
        assert identity == dxgi._FACTORY1.bytes_le
        return factory.give(ctypes.cast(result, POINTER).value or 0)

    found = list(adapters(create))
    assert found == [
        Adapter("NVIDIA GeForce RTX 5060 Ti", 0x10DE, 0x2D04, 16 * GIB, False, 0, 15 * GIB),
        Adapter("Intel(R) UHD Graphics 770", 0x8086, 0x2D04, 128 << 20, False, 2, None),
        Adapter("Microsoft Basic Render Driver", 0x1414, 0x2D04, 0, True, 0, None),
    ]
    assert [item.references for item in (factory, *listed)] == [0, 0, 0, 0]


def test_refused_factory_is_unknown() -> None:
    with pytest.raises(Unknown, match="CreateDXGIFactory1 returned 0x80004002"):
        list(adapters(lambda identity, result: NO_INTERFACE))


def test_facts_leave_the_software_renderer_out() -> None:
    facts = adapter_facts(
        [
            Adapter("NVIDIA", 0x10DE, 0x2D04, 16 * GIB, False, 0, 15 * GIB),
            Adapter("Intel", 0x8086, 0x4680, 128 << 20, False, 1, None),
            Adapter("Microsoft Basic Render Driver", 0x1414, 0x8C, 0, True, 0, None),
        ]
    )
    nvidia, intel = facts.adapters
    assert isinstance(nvidia, DisplayAdapter)
    assert (nvidia.vendor, nvidia.pci_id, nvidia.displays, nvidia.budget_bytes) == ("NVIDIA", "10de:2d04", 0, 15 * GIB)
    assert (intel.vendor, intel.displays, intel.budget_bytes) == ("Intel", 1, None)
    assert "budget_bytes" in intel.unknown
    assert (nvidia.integrated, intel.integrated) == (False, True)


@pytest.mark.parametrize(
    ("vendor", "dedicated", "integrated"),
    [
        (0x8086, 128 << 20, True),
        (0x8086, 8 * GIB, False),  # Arc
        (0x1002, 512 << 20, True),
        (0x1002, 16 * GIB, None),  # a card, or a processor's graphics that much was set aside for
        (0x10DE, 16 * GIB, False),
        (0x10DE, 0, None),
        (0x1AF4, 0, None),
    ],
)
def test_graphics_of_the_processor_are_known_by_the_memory_set_aside(
    vendor: int, dedicated: int, integrated: bool | None
) -> None:
    (found,) = adapter_facts([Adapter("x", vendor, 1, dedicated, False, 1, None)]).adapters
    assert found.integrated is integrated
    assert ("integrated" in found.unknown) == (integrated is None)
