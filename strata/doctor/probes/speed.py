"""How fast bytes move: within RAM, to the device from pinned and pageable memory, and within the device."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from strata.doctor.facts import SpeedFacts
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.cuda import device_uuid, driver_library, import_cupy
from strata.doctor.probes.host import usable_processors
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import ProbeRequest

MIB = 1 << 20
PASSES = 3  # the best one counts: whatever else runs only slows a pass down
COPY_BYTES = 256 * MIB
SLOT_BYTES = 4 * MIB  # most of one staging slot; every thread has two, and fills one while the other is copied
VRAM_SHARE = 0.125  # of the free device memory, for each of two buffers
LOADED_S = 0.15  # how long the link is kept busy while its width is read
_ALLOC_FLAGS = 3  # cudaHostAllocPortable | cudaHostAllocMapped
_NON_BLOCKING = 1  # cudaStreamNonBlocking


def probe(request: ProbeRequest) -> Iterator[SpeedFacts]:
    """Yield the speed of RAM, then the device's."""
    threads = thread_counts(usable_processors())
    found = Collector()
    found.take("ram_read_bytes_per_s", lambda: ram_read(request.ram_bytes, threads), "numpy's maximum of a buffer")
    if request.cuda_missing is not None:
        in_device = [name for name in SpeedFacts.__struct_fields__ if name not in ("unknown", "sources", *found.values)]
        found.unknown |= dict.fromkeys(in_device, request.cuda_missing) | found.unknown
        yield SpeedFacts(**found.fields())
        return
    yield SpeedFacts(**found.fields())
    runtime = import_cupy({}).cuda.runtime
    copies = DeviceCopies(runtime, request.device, min(COPY_BYTES, request.ram_bytes))
    # asked of the driver after the runtime has started it: before, the driver knows no device
    found.take("device_uuid", lambda: device_uuid(driver_library(), request.device))
    with NvmlGauge.open(request.nvml_missing) as gauge:
        collect_device(found, copies, threads, gauge)
    yield SpeedFacts(**found.fields())


def thread_counts(usable: int) -> list[int]:
    """Return the thread counts that are tried: one, four, all."""
    return sorted({1, min(4, usable), usable})


def best_rate(nbytes: int, run: Callable[[], object]) -> float:
    """Return the bytes per second of the fastest of a few runs."""
    fastest = float("inf")
    for _ in range(PASSES):
        started = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - started)
    return nbytes / fastest


def ram_read(nbytes: int, thread_counts: list[int]) -> dict[int, float]:
    """Return how fast a buffer of `nbytes` is read, by number of threads."""
    import numpy as np

    if nbytes < MIB:
        raise Unknown("too little RAM is available to measure it")
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # only to fill it in a fraction of the time
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1
    rates = {}
    for threads in thread_counts:
        parts = np.array_split(buffer, threads)
        with ThreadPoolExecutor(threads) as pool:
            rates[threads] = best_rate(nbytes, lambda parts=parts, pool=pool: list(pool.map(np.max, parts)))  # type: ignore[misc]
    return rates


def collect_device(found: Collector, copies: DeviceCopies, threads: list[int], gauge: NvmlGauge) -> None:
    """Collect every speed that involves the device."""
    found.take("h2d_pinned_bytes_per_s", copies.from_pinned, f"cudaMemcpyAsync of {copies.nbytes // MIB} MiB")
    found.take("h2d_pageable_bytes_per_s", lambda: {n: copies.from_pageable(n) for n in threads}, "cudaMemcpyAsync")
    found.take("h2d_staged_bytes_per_s", lambda: {n: copies.staged(n) for n in threads}, "memmove + cudaMemcpyAsync")
    found.take("device_copy_bytes_per_s", copies.within, f"cudaMemcpyAsync of {copies.nbytes // MIB} MiB")
    link = ("pcie_generation_loaded", "pcie_width_loaded")
    speed, uuid = found.values.get("h2d_pinned_bytes_per_s"), found.values.get("device_uuid")
    if speed is None:
        found.unknown.update(dict.fromkeys(link, "nothing could be copied from pinned memory"))
    else:
        found.take_all(link, lambda: copies.link_under_load(speed, gauge, uuid), "NVML")


class DeviceCopies:
    """Buffers on both sides of the link, and timed copies between them.

    Parameters
    ----------
    runtime : module
        CuPy's ``cuda.runtime``, or one that acts like it.
    device : int
        CUDA ordinal.
    most_bytes : int
        Size of a copy, less when little device memory is free.
    """

    def __init__(self, runtime: Any, device: int, most_bytes: int) -> None:
        self._runtime = runtime
        self._device = device
        runtime.setDevice(device)
        free, _ = runtime.memGetInfo()
        self.nbytes = max(min(most_bytes, int(free * VRAM_SHARE)) // MIB * MIB, MIB)
        self._on_device = runtime.malloc(self.nbytes)
        self._pageable = mmap.mmap(-1, self.nbytes)
        self._pageable_address = ctypes.addressof(ctypes.c_char.from_buffer(self._pageable))
        ctypes.memset(self._pageable_address, 1, self.nbytes)
        self._pinned_address = 0

    def _pinned(self) -> int:
        if not self._pinned_address:
            self._pinned_address = self._runtime.hostAlloc(self.nbytes, _ALLOC_FLAGS)
            ctypes.memset(self._pinned_address, 1, self.nbytes)
        return self._pinned_address

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream)

    def _timed(self, target: int, source: int) -> float:
        stream = self._runtime.streamCreateWithFlags(_NON_BLOCKING)

        def run() -> None:
            self._copy(target, source, self.nbytes, stream)
            self._runtime.streamSynchronize(stream)

        return best_rate(self.nbytes, run)

    def from_pinned(self) -> float:
        """Return the copy speed from pinned memory to the device."""
        return self._timed(self._on_device, self._pinned())

    def within(self) -> float:
        """Return the copy speed within the device."""
        other = self._runtime.malloc(self.nbytes)
        try:
            return self._timed(other, self._on_device)
        finally:
            self._runtime.free(other)

    def from_pageable(self, threads: int) -> float:
        """Return the speed at which `threads` copy from pageable memory, each its part on a stream of its own."""

        def copy(stream: int, start: int, nbytes: int) -> None:
            self._copy(self._on_device + start, self._pageable_address + start, nbytes, stream)
            self._runtime.streamSynchronize(stream)

        return self._by_threads(threads, lambda number: self._runtime.streamCreateWithFlags(_NON_BLOCKING), copy)

    def staged(self, threads: int) -> float:
        """Return the speed at which `threads` move pageable memory to pinned slots that are then copied on."""
        slot_bytes = min(SLOT_BYTES, self.nbytes // (2 * threads))
        pinned = self._pinned()

        def slots(number: int) -> list[tuple[int, int]]:
            first = pinned + 2 * number * slot_bytes
            streams = [self._runtime.streamCreateWithFlags(_NON_BLOCKING) for _ in range(2)]
            return [(first + position * slot_bytes, stream) for position, stream in enumerate(streams)]

        def copy(slots: list[tuple[int, int]], start: int, nbytes: int) -> None:
            for turn, offset in enumerate(range(start, start + nbytes, slot_bytes)):
                slot, stream = slots[turn % 2]
                length = min(slot_bytes, start + nbytes - offset)
                self._runtime.streamSynchronize(stream)  # the slot's last copy must be through
                ctypes.memmove(slot, self._pageable_address + offset, length)
                self._copy(self._on_device + offset, slot, length, stream)
            for _, stream in slots:
                self._runtime.streamSynchronize(stream)

        return self._by_threads(threads, slots, copy)

    def _by_threads(self, threads: int, prepare: Callable[[int], Any], copy: Callable[[Any, int, int], None]) -> float:
        part = self.nbytes // threads

        def run_one(number: int) -> None:
            self._runtime.setDevice(self._device)  # the current device belongs to a thread
            copy(prepared[number], number * part, part)

        prepared = [prepare(number) for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            return best_rate(part * threads, lambda: list(pool.map(run_one, range(threads))))

    def link_under_load(self, bytes_per_s: float, gauge: NvmlGauge, uuid: str | None) -> tuple[int, int]:
        """Return the link's PCIe generation and width while it copies."""
        index = gauge.index(uuid, self._runtime.deviceGetPCIBusId(self._device))
        stream = self._runtime.streamCreateWithFlags(_NON_BLOCKING)
        for _ in range(1 + int(bytes_per_s * LOADED_S / self.nbytes)):
            self._copy(self._on_device, self._pinned(), self.nbytes, stream)
        time.sleep(LOADED_S / 3)
        link = gauge.link(index)
        self._runtime.streamSynchronize(stream)
        return link
