"""How much page-locked memory this system grants: by asking for it, chunk by chunk, and using every chunk.

CuPy's pool of pinned memory is never used: it rounds up to powers of two. CuPy reads a failed call's error away
itself before it raises, so that no later call reports it again.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from platform import release
from typing import Any

import msgspec

from strata.doctor.cuda_codes import cuda_error
from strata.doctor.facts import PinnedFacts, ProbeError, ProbeStatus
from strata.doctor.probes.collect import Collector
from strata.doctor.probes.cuda import device_uuid, driver_library, import_cupy
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import (
    LARGE_CHUNK,
    LEFT_FREE_BYTES,
    MIB,
    SMALL_CHUNK,
    ProbeRequest,
    ProbeStopped,
)

SCRATCH_BYTES = 16 * MIB  # device memory that chunks are copied through
MALLOC_TEST_BYTES = MIB
_ALLOC_FLAGS = 3  # cudaHostAllocPortable | cudaHostAllocMapped; cudaHostRegister's two are the same
_BAD_KERNEL = re.compile(r"6\.11(\.|-|$)")


def probe(request: ProbeRequest) -> Iterator[PinnedFacts]:
    """Yield how much was granted, after each chunk."""
    if sys.platform == "linux" and is_known_bad(release()):
        why = f"Linux {release()} can lose memory until the next boot when a pin is refused, so none is tried"
        raise ProbeStopped(ProbeStatus.SKIPPED, ProbeError(why))
    runtime = import_cupy({}).cuda.runtime
    with NvmlGauge.open(request.nvml_missing) as gauge:
        yield from try_pinning(runtime, request, lambda: device_uuid(driver_library(), request.device), gauge)


def is_known_bad(kernel: str) -> bool:
    """Return whether this Linux kernel leaks memory on refused pins."""
    return _BAD_KERNEL.match(kernel) is not None


def chunk_size(asked: int) -> int:
    """Return the chunk in which `asked` bytes are pinned: 64 to 256 MiB, or all at once when it is less."""
    return min(asked, LARGE_CHUNK if asked >= 4 * LARGE_CHUNK else SMALL_CHUNK)


def try_pinning(runtime: Any, request: ProbeRequest, uuid: Any, gauge: NvmlGauge) -> Iterator[PinnedFacts]:
    """Yield how much `runtime` (CuPy's ``cuda.runtime``, or one that acts like it) grants.

    Where Windows manages VRAM, a grant is a promise, and memory that was written may have gone to RAM: `gauge` is
    asked how much of the ballast is in VRAM once all of it was written.

    Raises
    ------
    ProbeStopped
        ``SKIPPED`` when nothing was asked for, ``FAILED`` when the ballast cannot be placed.
    """
    asked = request.pin_bytes
    if asked <= 0:
        raise ProbeStopped(ProbeStatus.SKIPPED, ProbeError("too little RAM is available to try"))
    facts = PinnedFacts(asked_bytes=asked, chunk_bytes=chunk_size(asked))
    try:
        runtime.setDevice(request.device)
    except RuntimeError as failure:
        refusal = cuda_error(failure, f"cudaSetDevice({request.device})")
        yield msgspec.structs.replace(facts, refusal=refusal, malloc_after_refusal_ok=False, malloc_refusal=refusal)
        return
    found = Collector()
    found.take("device_uuid", uuid, "cuDeviceGetUuid")
    if request.ballast_bytes:
        _hold_ballast(runtime, request, found, gauge)
    facts = PinnedFacts(
        asked_bytes=asked, chunk_bytes=facts.chunk_bytes, ballast_bytes=request.ballast_bytes, **found.fields()
    )
    yield facts
    chunks: list[int] = []
    for grown in _pin_chunks(runtime, facts, chunks):
        facts = grown
        yield facts
    if facts.refusal is not None:
        error = _try_malloc(runtime)
        facts = msgspec.structs.replace(facts, malloc_after_refusal_ok=error is None, malloc_refusal=error)
        yield facts
    for address in chunks:
        runtime.freeHost(address)
    yield _try_register(runtime, facts)


def _hold_ballast(runtime: Any, request: ProbeRequest, found: Collector, gauge: NvmlGauge) -> None:
    """Place the ballast, and collect how much of it is in VRAM."""

    def look() -> tuple[int, int]:
        runtime.memGetInfo()  # makes the context, which must not count
        index = gauge.index(found.values.get("device_uuid"), runtime.deviceGetPCIBusId(request.device))
        return index, gauge.used_bytes(index)

    before = Collector()
    before.take_all(("index", "used"), look)
    _place_ballast(runtime, request.ballast_bytes)
    if before.unknown:
        found.unknown["ballast_resident_bytes"] = before.unknown["used"]
        return
    index, used = before.values["index"], before.values["used"]
    found.take("ballast_resident_bytes", lambda: max(gauge.used_bytes(index) - used, 0), "NVML")


def _place_ballast(runtime: Any, nbytes: int) -> None:
    """Hold device memory, touched, until this process ends."""
    call = f"cudaMalloc({_mib(nbytes)} of ballast)"
    try:
        free, _ = runtime.memGetInfo()
        if nbytes > free - LEFT_FREE_BYTES:
            why = f"of {_mib(free)} that are free, the ballast would not leave {_mib(LEFT_FREE_BYTES)}"
            raise ProbeStopped(ProbeStatus.FAILED, ProbeError(why, call=call))
        runtime.memset(runtime.malloc(nbytes), 0, nbytes)
        runtime.deviceSynchronize()
    except RuntimeError as failure:
        raise ProbeStopped(ProbeStatus.FAILED, cuda_error(failure, call)) from failure


def _pin_chunks(runtime: Any, facts: PinnedFacts, chunks: list[int]) -> Iterator[PinnedFacts]:
    """Pin until everything asked for is granted or a call is refused; `chunks` gets the addresses."""
    while facts.granted_bytes < facts.asked_bytes:
        size = min(facts.chunk_bytes, facts.asked_bytes - facts.granted_bytes)
        call = f"cudaHostAlloc({_mib(size)})"
        try:
            address = runtime.hostAlloc(size, _ALLOC_FLAGS)
            chunks.append(address)
            call = f"copying {_mib(size)} to the device and back"
            intact = _round_trip(runtime, address, size, len(chunks))
        except RuntimeError as failure:
            yield msgspec.structs.replace(facts, refusal=cuda_error(failure, call))
            return
        facts = msgspec.structs.replace(
            facts,
            granted_bytes=facts.granted_bytes + size,
            largest_chunk_bytes=max(facts.largest_chunk_bytes, size),
            verified=intact and facts.verified is not False,
        )
        yield facts


def _round_trip(runtime: Any, address: int, size: int, number: int) -> bool:
    """Touch all of a chunk, copy it to the device, read it back, and return whether it came back equal."""
    value = 1 + number % 255
    ctypes.memset(address, value, size)
    step = min(size, SCRATCH_BYTES)
    scratch = runtime.malloc(step)
    back = ctypes.create_string_buffer(step)
    expected = bytes([value]) * step
    intact = True
    for offset in range(0, size, step):
        length = min(step, size - offset)
        runtime.memset(scratch, 0, length)  # what an earlier step left there must not pass for this one
        runtime.memcpy(scratch, address + offset, length, runtime.memcpyHostToDevice)
        runtime.memcpy(ctypes.addressof(back), scratch, length, runtime.memcpyDeviceToHost)
        intact = intact and back.raw[:length] == expected[:length]
    runtime.free(scratch)
    return intact


def _try_malloc(runtime: Any) -> ProbeError | None:
    """Return None when the device still grants memory and runs commands, else what it answered."""
    try:
        address = runtime.malloc(MALLOC_TEST_BYTES)
        runtime.memset(address, 0, MALLOC_TEST_BYTES)
        runtime.deviceSynchronize()
        runtime.free(address)
    except RuntimeError as failure:
        return cuda_error(failure, f"cudaMalloc({_mib(MALLOC_TEST_BYTES)})")
    return None


def _try_register(runtime: Any, facts: PinnedFacts) -> PinnedFacts:
    """Lock one chunk of ordinary memory in place, the other way to pin, with nothing else pinned."""
    size = facts.chunk_bytes
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        runtime.hostRegister(address, size, _ALLOC_FLAGS)
        intact = _round_trip(runtime, address, size, 0)
        runtime.hostUnregister(address)
    except RuntimeError as failure:
        refusal = cuda_error(failure, f"cudaHostRegister({_mib(size)})")
        return msgspec.structs.replace(facts, register_granted_bytes=0, register_refusal=refusal)
    return msgspec.structs.replace(facts, register_granted_bytes=size, verified=intact and facts.verified is not False)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
