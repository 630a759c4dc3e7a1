"""The only way the runtime gets memory: through a line of the plan.

`PlannedMemory` takes a reservation whole, from the backend, the first time something is carved out of it, and
hands out aligned arrays until its bytes are spent. A request without a reservation, or beyond it, is a
`PlanViolation`; so is device memory asked for after pinning began, since a system that couples the two refuses
whichever comes last. Memory the backend refuses is an `AllocationFailed` that names the line.

A backend's part is one function, a `Taker`. `take_host` is the numpy backend's: every tier is ordinary RAM.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from strata.doctor.plan import AllocationPlan, Reservation, Tier
from strata.errors import AllocationFailed, PlanViolation
from strata.gguf.footprint import BufferSpec
from strata.kernels.ops import Array
from strata.runtime.process_memory import MemoryReport, TierMemory, map_private

Step = Callable[[int], None]  # told the bytes of each step of filling what was taken

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load
_DTYPES = {
    "f16": np.float16,
    "f32": np.float32,
    "i32": np.int32,
    "u8": np.uint8,
    "u32": np.uint32,
    "u64": np.uint64,
}  # by the names that footprints use
TEMPORARIES_LINE = "temporaries"  # charged for what libraries allocate by themselves
_REMEDY = "Close other programs, or plan again with a smaller budget"
_TOUCH_STEP = 256 << 20  # bytes touched between two chances to be interrupted
_TOUCH_THREADS = 8  # most that touch: the system takes its time to clear pages

_TIER_NAMES = {Tier.VRAM: "VRAM", Tier.PINNED: "page-locked RAM", Tier.PAGEABLE: "RAM"}

AllocationLog = Callable[[Reservation, Exception | None], None]  # the reservation, and why it was refused


class MemoryRefused(MemoryError):
    """A driver's refusal, with what it says of it.

    Parameters
    ----------
    call : str
        The driver's function: "cudaMalloc", "cudaHostRegister".
    code : int
    name : str
        "cudaErrorMemoryAllocation".
    string : str
        The driver's own words for it: "out of memory".
    free_bytes : int, optional
        Of that memory, at that time, as the driver counts it.
    granted_bytes : int
        Of the same reservation, where it takes several calls and earlier ones succeeded; given back since.
    broken : bool
        A little device memory was refused right after it, too, and not for want of memory: nothing works any more.
        See `strata.runtime.driver_errors.refuses_all`.
    around : str, optional
        What else was so at that time, for people: devices, free memory, system.
    """

    def __init__(
        self,
        call: str,
        code: int,
        name: str,
        string: str,
        *,
        free_bytes: int | None = None,
        granted_bytes: int = 0,
        broken: bool = False,
        around: str = "",
    ) -> None:
        super().__init__(f"{call}: {string} ({code} {name})")
        self.call = call
        self.code = code
        self.name = name
        self.free_bytes = free_bytes
        self.granted_bytes = granted_bytes
        self.broken = broken
        self.around = around


class Block(Protocol):
    """One reservation's memory, as a backend gave it."""

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a view of `shape` and `dtype` that starts `offset` bytes into the block."""

    def release(self) -> None:
        """Give the memory back. Views that are still held become worthless."""


Taker = Callable[[Reservation], Block]


class HostBlock:
    """Anonymous RAM straight from the operating system, touched, so that it is there and stays there."""

    def __init__(self, nbytes: int) -> None:
        self._map = map_private(nbytes)
        pages = np.frombuffer(self._map, np.uint8)

        def touch(start: int) -> None:
            pages[start : start + _TOUCH_STEP : mmap.PAGESIZE] = 0

        starts = range(0, nbytes, _TOUCH_STEP)
        threads = min(len(starts), os.cpu_count() or 1, _TOUCH_THREADS)
        try:
            if threads < 2:
                for start in starts:
                    touch(start)
                return
            with ThreadPoolExecutor(threads, "touch") as pool:
                try:
                    for _ in pool.map(touch, starts):
                        continue
                finally:
                    pool.shutdown(cancel_futures=True)
        except BaseException:  # Ctrl-C: nothing may stay behind, whoever holds the traceback
            self.release()
            raise

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a view into the block; see `Block`."""
        nbytes = math.prod(shape) * dtype.itemsize
        # Through frombuffer, which holds on to the mapping: ndarray(buffer=...) would be left pointing at nothing.
        return np.frombuffer(self._map, np.uint8, nbytes, offset).view(dtype).reshape(shape)

    def release(self) -> None:
        """Give the memory back at once, even where views (in a traceback, say) still hold the mapping."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        try:
            self._map.close()
        except BufferError:  # a view is alive: the mapping goes when the last one does
            return


def take_host(reservation: Reservation) -> Block:
    """Take a reservation from RAM: the numpy backend's `Taker`, whatever the tier plays."""
    return HostBlock(reservation.bytes)


@dataclass
class _Taken:
    reservation: Reservation
    block: Block
    used: int = 0


class PlannedMemory:
    """Every byte of the runtime, by the plan's lines. A context manager: leaving it frees everything.

    Parameters
    ----------
    plan : AllocationPlan
        Its reservations are the whole budget.
    take : Taker
        The backend's allocator.
    log : AllocationLog, optional
        Told of every reservation taken or refused.
    """

    def __init__(self, plan: AllocationPlan, *, take: Taker = take_host, log: AllocationLog | None = None) -> None:
        self._plan = plan
        self._take = take
        self._log = log or (lambda reservation, refusal: None)
        self._taken: dict[str, _Taken] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def take(self, lines: Collection[str]) -> None:
        """Take those of `lines` that the plan has and that need memory, in the plan's order.

        Raises
        ------
        AllocationFailed
            The memory refused one.
        """
        for reservation in self._plan.reservations:
            if reservation.id in lines and reservation.tier is not Tier.FILE:
                self._take_line(reservation.id, reservation.what)

    def array(self, line: str, shape: Iterable[int], dtype: DTypeLike, *, name: str) -> Array:
        """Carve an array out of a reservation.

        Parameters
        ----------
        line : str
            Id of the reservation.
        shape : iterable of int
        dtype : dtype
        name : str
            What it is for, to be named when it does not fit.

        Returns
        -------
        Array
            Zeroed when the reservation was just taken from RAM; 64-byte-aligned, C-contiguous.

        Raises
        ------
        PlanViolation
            The plan has no such line, the line has no memory, or fewer bytes are left in it than asked for.
        AllocationFailed
            The memory refused the reservation.
        """
        shape, dtype = tuple(shape), np.dtype(dtype)
        taken = self._taken.get(line) or self._take_line(line, name)
        asked = math.prod(shape) * dtype.itemsize
        start = -(-taken.used // ALIGNMENT) * ALIGNMENT
        if start + asked > taken.reservation.bytes:
            left = max(taken.reservation.bytes - start, 0)
            raise _violation(
                line, name, f"{asked} bytes were asked for and {left} of {taken.reservation.bytes} are left"
            )
        array = taken.block.array(start, shape, dtype)
        taken.used = start + asked
        return array

    def buffer(self, line: str, spec: BufferSpec) -> Array:
        """Carve the array that a footprint lists; see `array`."""
        return self.array(line, spec.shape, _DTYPES[spec.dtype], name=spec.name)

    def left(self, line: str) -> int:
        """Return the bytes of a reservation that nothing was carved out of yet."""
        if line in self._taken:
            return self._taken[line].reservation.bytes - self._taken[line].used
        reservation = self._plan.line(line)
        return reservation.bytes if reservation else 0

    def whole(self, tier: Tier) -> Iterator[tuple[Reservation, Array]]:
        """Yield every reservation taken in `tier` with all of its memory, uint8 and flat."""
        for taken in self._taken.values():
            if taken.reservation.tier is tier:
                nbytes = taken.reservation.bytes
                yield taken.reservation, taken.block.array(0, (nbytes,), np.dtype(np.uint8))

    def allocated_bytes(self, tier: Tier | None = None) -> int:
        """Return the allocator's own sum: the bytes of every reservation taken, in `tier` or in all."""
        return sum(t.reservation.bytes for t in self._taken.values() if tier in (None, t.reservation.tier))

    def report(self, *, actual_bytes: int, peak_bytes: int) -> MemoryReport:
        """Set the plan beside what was taken and what the process holds in RAM, now and at its highest.

        On the CPU every tier is RAM; a GPU's memory is counted apart.
        """
        memories = tuple(
            TierMemory(tier, self._plan.planned_bytes(tier), self.allocated_bytes(tier))
            for tier in (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE)
        )
        on_cpu = self._plan.device.backend != "cuda"  # a simulated device lies in RAM, too
        ram = [m for m in memories if on_cpu or m.tier is not Tier.VRAM]
        return MemoryReport(
            tiers=memories,
            planned_bytes=sum(m.planned_bytes for m in ram),
            allocated_bytes=sum(m.allocated_bytes for m in ram),
            actual_bytes=actual_bytes,
            peak_bytes=peak_bytes,
        )

    def free(self) -> None:
        """Give every reservation back, the last taken first. Arrays carved out of them are worthless after it."""
        while self._taken:
            _, taken = self._taken.popitem()
            taken.block.release()

    def _memory(self, reservation: Reservation) -> str:
        """Name the memory a line lies in, for people: on a CPU every tier is RAM, whatever it plays."""
        return "RAM" if self._plan.device.backend == "numpy" else _TIER_NAMES[reservation.tier]

    def _take_line(self, line: str, name: str) -> _Taken:
        reservation = self._plan.line(line)
        if reservation is None:
            raise _violation(line, name, "the plan has no such line")
        if reservation.tier is Tier.FILE:
            raise _violation(line, name, "the line lies in the model file and has no memory")
        if reservation.bytes <= 0:
            raise _violation(line, name, "the line holds no bytes")
        if reservation.tier is Tier.VRAM and self.allocated_bytes(Tier.PINNED):
            raise _violation(line, name, "device memory was asked for after memory was pinned")
        try:
            block = self._take(reservation)
        except (MemoryError, OSError) as error:
            self._log(reservation, error)
            raise AllocationFailed(
                f'take {_size(reservation.bytes)} of {self._memory(reservation)} for "{line}" ({reservation.what})',
                f"the system refused it ({_plainly(error)})",
                _REMEDY,
                line=line,
                nbytes=reservation.bytes,
            ) from error
        self._log(reservation, None)
        taken = self._taken[line] = _Taken(reservation, block)
        return taken


def allocation_event(reservation: Reservation, refusal: Exception | None) -> dict[str, Any]:
    """Return the fields that a run's log has for an allocation: "ok" as its code, or all that is known of a refusal."""
    event: dict[str, Any] = {"line": reservation.id, "tier": reservation.tier, "bytes": reservation.bytes}
    if refusal is None:
        return event | {"code": "ok"}
    event["code"] = _words(refusal)
    if isinstance(refusal, MemoryRefused):
        event |= {"call": refusal.call, "number": refusal.code, "name": refusal.name, "free_bytes": refusal.free_bytes}
    return event


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes:,} bytes"


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, MemoryRefused) else f"{type(error).__name__}: {error}"


def _plainly(error: Exception) -> str:
    """Say why memory was refused, for people; the log has the type too."""
    if isinstance(error, MemoryRefused) and error.around:
        return f"{error}; {error.around}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or "no reason was given"


@contextmanager
def charged_to(plan: AllocationPlan, line: str) -> Iterator[None]:
    """Turn a `MemoryError` into an `AllocationFailed` of `line`, for memory that a library takes by itself."""
    try:
        yield
    except MemoryError as error:
        reservation = plan.line(line)
        raise AllocationFailed(
            f'work within the plan\'s line "{line}"',
            f"the system refused memory ({_plainly(error)})",
            _REMEDY,
            line=line,
            nbytes=reservation.bytes if reservation else 0,
        ) from error


def _violation(line: str, name: str, found: str) -> PlanViolation:
    return PlanViolation(
        f'take memory for {name} from the plan\'s line "{line}"',
        found,
        "This is a bug of Strata: please report it with the run log.",
    )
