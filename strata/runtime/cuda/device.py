"""One CUDA device: its memory, its stream, and the words for what it refuses.

Nothing is taken from CuPy's pools: a reservation is one cudaMalloc, or RAM that is page-locked where it lies.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import cupy
import numpy as np
import pynvml as _pynvml
from cupy_backends.cuda.api.driver import CUDADriverError
from cupy_backends.cuda.api.runtime import CUDARuntimeError

from strata.doctor.plan import Reservation, Tier
from strata.errors import DeviceFailed, KernelError, PlanViolation
from strata.kernels.ops import Array
from strata.runtime.driver_errors import refuses_all
from strata.runtime.expert_store import PINNED_LINE
from strata.runtime.memory import Block, HostBlock, MemoryRefused
from strata.runtime.wsl import under_wsl

_runtime = cupy.cuda.runtime
_nvml: Any = _pynvml
_TO_DEVICE, _TO_HOST = _runtime.memcpyHostToDevice, _runtime.memcpyDeviceToHost
_WITHIN = _runtime.memcpyDeviceToDevice
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_MIB = 1 << 20
PIN_SLICE = 256 * _MIB  # page-locked at once: no more than what doctor's measurement was granted in one piece
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaDevice:
    """The device of a plan, opened. Until `close`, CuPy can allocate nothing by itself.

    Attributes
    ----------
    stream : cupy.cuda.Stream
        Everything runs on it, in order.
    held_bytes : int
        Of its memory and page-locked, by reservations.
    unpinned_bytes : int
        Of what was to be page-locked and may as well lie in ordinary RAM: what the system refused to lock.
    """

    def __init__(self, ordinal: int, uuid: str) -> None:
        self._ordinal = ordinal
        self._uuid = uuid
        self.held_bytes = self.unpinned_bytes = 0
        self._free_before = _driver_free(uuid)
        self._allocator = cupy.cuda.get_allocator()
        with self.errors("start CUDA"):
            cupy.cuda.Device(ordinal).use()
            self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.set_allocator(_unplanned)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block of a kernel can ask for."""
        return int(cupy.cuda.Device(self._ordinal).attributes["MaxSharedMemoryPerBlockOptin"])

    @classmethod
    def open(cls, uuid: str) -> Self:
        """Open the device with this UUID.

        Raises
        ------
        DeviceFailed
            It is not visible to CUDA, or does not start.
        """
        try:
            found = {_uuid(ordinal): ordinal for ordinal in range(_runtime.getDeviceCount())}
        except CUDARuntimeError as error:
            raise DeviceFailed(f"use GPU {uuid}", str(error), "Run `strata doctor`, or use --device cpu") from error
        if uuid not in found:
            raise DeviceFailed(
                f"use GPU {uuid}",
                f"CUDA sees {', '.join(found) or 'no device'}",
                "Make a new plan; CUDA_VISIBLE_DEVICES may hide it",
            )
        return cls(found[uuid], uuid)

    def close(self) -> None:
        """Give CuPy its allocator back."""
        cupy.cuda.set_allocator(self._allocator)

    def take(self, reservation: Reservation) -> Block:
        """Take a reservation: this backend's `Taker`.

        Raises
        ------
        MemoryRefused
            With the call, CUDA's code, name and words, and what is free.
        """
        if reservation.tier is Tier.VRAM:
            return _DeviceBlock(self, reservation.bytes)
        block = HostBlock(reservation.bytes)
        if reservation.tier is not Tier.PINNED:
            return block
        pinned = _PinnedBlock(self, block, reservation.bytes, part_will_do=reservation.id == PINNED_LINE)
        self.unpinned_bytes += reservation.bytes - pinned.nbytes
        return pinned

    def to_device(self, to: Array, source: np.ndarray[Any, Any]) -> None:
        """Copy from the host, in order with the stream. Page-locked memory must stay as it is until then."""
        _runtime.memcpyAsync(to.data.ptr, source.ctypes.data, source.nbytes, _TO_DEVICE, self.stream.ptr)

    def send(self, to: Array, source: np.ndarray[Any, Any]) -> None:
        """`to_device`, from any thread."""
        cupy.cuda.Device(self._ordinal).use()
        self.to_device(to, source)

    def copy_seconds(self, to: Array, source: Array) -> float:
        """Return how long a copy to device memory takes by the device's own clock, from there or from the host."""
        host = isinstance(source, np.ndarray) and not isinstance(source, cupy.ndarray)
        pointer, kind = (source.ctypes.data, _TO_DEVICE) if host else (source.data.ptr, _WITHIN)
        started = self.stream.record()
        _runtime.memcpyAsync(to.data.ptr, pointer, source.nbytes, kind, self.stream.ptr)
        ended = self.stream.record()
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(started, ended)) / 1e3

    def to_host(self, to: np.ndarray[Any, Any], source: Array) -> None:
        """Copy to the host, in order with the stream: it is there after `wait`."""
        _runtime.memcpyAsync(to.ctypes.data, source.data.ptr, to.nbytes, _TO_HOST, self.stream.ptr)

    def address(self, pinned: np.ndarray[Any, Any]) -> int:
        """Return where the device reads page-locked memory, or 0 where not all of it is there in one piece."""
        first, last = (self._seen_at(pinned.ctypes.data + offset) for offset in (0, pinned.nbytes - 1))
        return first if first and last - first == pinned.nbytes - 1 else 0

    def _seen_at(self, pointer: int) -> int:
        return int(_runtime.pointerGetAttributes(pointer).devicePointer or 0)

    def mapped(self, pinned: np.ndarray[Any, Any]) -> Array:
        """View page-locked memory as the device sees it."""
        address = int(_runtime.pointerGetAttributes(pinned.ctypes.data).devicePointer)
        memory = cupy.cuda.UnownedMemory(address, pinned.nbytes, pinned)
        return cupy.ndarray(pinned.shape, pinned.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def wait(self) -> None:
        """Wait until the stream has done everything."""
        self.stream.synchronize()

    def drain(self) -> None:
        """Wait, whatever comes of it, before memory is given back that a copy may still go to."""
        try:
            self.stream.synchronize()
        except CUDARuntimeError:  # a lost device has nothing left to wait for
            return

    @contextmanager
    def errors(self, asked: str) -> Iterator[None]:
        """Make this the current device, and turn CUDA's errors into one that says what was `asked` and what is known.

        Raises
        ------
        DeviceFailed
            With CUDA's code, name and words, how many devices there are, what is free, and whether this is WSL2.
        """
        try:
            cupy.cuda.Device(self._ordinal).use()
            yield
        except (CUDARuntimeError, CUDADriverError) as error:
            self._failed(asked, f"CUDA answered {error} (code {error.status})", error)
        except KernelError as error:
            self._failed(f"{asked}: {error.asked}", error.found, error)

    def _failed(self, asked: str, found: str, error: Exception) -> NoReturn:
        raise DeviceFailed(
            asked,
            f"{found}; {self.state()}",
            "Nothing stays allocated: run it again. If it happens again, run `strata doctor`; a lost device comes back"
            " with a new process, a reset of the driver or a restart",
        ) from error

    def state(self) -> str:
        """Say how many devices there are, what is free on this one now, and whether this is WSL2."""
        wsl = "under WSL2" if under_wsl() else "not under WSL2"
        try:
            count: int | str = _runtime.getDeviceCount()
        except CUDARuntimeError as error:
            count = f"none to be counted ({error})"
        free = self.free_bytes()
        if free is None:
            free = _driver_free(self._uuid)
        left = "unknown how much is free" if free is None else f"{free / _MIB:,.0f} MiB free now"
        return f"{count} CUDA device{'' if count == 1 else 's'}, {left}, {wsl}"

    @property
    def integrated(self) -> bool:
        """Whether the device's memory is the system's RAM."""
        return bool(cupy.cuda.Device(self._ordinal).attributes.get("Integrated"))

    def free_bytes(self) -> int | None:
        """Return what CUDA calls free on this device, or None where it does not answer."""
        try:
            return int(_runtime.memGetInfo()[0])
        except CUDARuntimeError:
            return None

    def vram(self) -> tuple[int | None, int | None]:
        """Return the driver's own count: VRAM taken since before this process's context, and VRAM free now."""
        now = _driver_free(self._uuid)
        taken = None if now is None or self._free_before is None else self._free_before - now
        return taken, now


class _DeviceBlock:
    """Device memory, zeroed."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._pointer = 0
        self._device = device
        self._nbytes = nbytes
        try:
            self._pointer = _runtime.malloc(nbytes)
            device.held_bytes += nbytes
            _runtime.memsetAsync(self._pointer, 0, nbytes, device.stream.ptr)
        except CUDARuntimeError as error:
            self.release()
            raise _refused(device, "cudaMalloc", error) from error

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        memory = cupy.cuda.UnownedMemory(self._pointer, self._nbytes, self)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset))

    def release(self) -> None:
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self._device.held_bytes -= self._nbytes
        _let_go(_runtime.free, pointer)


class _PinnedBlock:
    """RAM that was touched, then page-locked where it lies: far quicker than having the driver allocate it.

    Where `part_will_do`, what follows the first slice that is refused stays as it is; `nbytes` is what was locked.
    """

    def __init__(self, device: CudaDevice, block: HostBlock, nbytes: int, *, part_will_do: bool) -> None:
        self._device = device
        self._block = block
        self._pointers: list[int] = []
        self.nbytes = 0
        address = int(block.array(0, (nbytes,), np.dtype(np.uint8)).ctypes.data)
        try:
            while self.nbytes < nbytes:
                size = min(PIN_SLICE, nbytes - self.nbytes)
                _runtime.hostRegister(address + self.nbytes, size, _PORTABLE_MAPPED)
                self._pointers.append(address + self.nbytes)
                self.nbytes += size
                device.held_bytes += size
        except CUDARuntimeError as error:
            if part_will_do and self.nbytes:
                return
            refused = _refused(device, "cudaHostRegister", error, granted=self.nbytes)
            self.release()
            raise refused from error
        except BaseException:
            self.release()
            raise

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._block.array(offset, shape, dtype)

    def release(self) -> None:
        self._device.held_bytes -= self.nbytes
        self.nbytes = 0
        self._device.drain()
        while self._pointers:
            _let_go(_runtime.hostUnregister, self._pointers.pop())
        self._block.release()


def _let_go(call: Any, pointer: int) -> None:
    if pointer:
        try:
            call(pointer)
        except CUDARuntimeError:  # the device is lost, and what it held with it
            return


def _refused(device: CudaDevice, call: str, error: CUDARuntimeError, granted: int = 0) -> MemoryRefused:
    name, _, string = str(error).partition(": ")
    return MemoryRefused(
        call,
        int(error.status),
        name,
        string,
        free_bytes=device.free_bytes(),
        granted_bytes=granted,
        broken=_is_broken(device),
        around=device.state(),
    )


def _is_broken(device: CudaDevice) -> bool:
    """Say whether even a little device memory is refused, and not for want of memory."""
    code = None
    try:
        _runtime.free(_runtime.malloc(_MIB))
    except CUDARuntimeError as error:
        code = int(error.status)
    return refuses_all(
        code,
        out_of_memory=_OUT_OF_MEMORY,
        held_bytes=device.held_bytes,
        free_bytes=device.free_bytes(),
        little=_MIB,
    )


def _unplanned(nbytes: int) -> NoReturn:
    raise PlanViolation(
        f"take {nbytes} bytes of device memory through CuPy",
        "the plan has no line for it",
        "This is a bug of Strata: please report it with the run log.",
    )


def _driver_free(uuid: str) -> int | None:
    """Return free VRAM as the driver counts it, with or without a context; None where NVML does not say."""
    try:
        _nvml.nvmlInit()
        try:
            return int(_nvml.nvmlDeviceGetMemoryInfo(_nvml.nvmlDeviceGetHandleByUUID(uuid)).free)
        finally:
            _nvml.nvmlShutdown()
    except _nvml.NVMLError:
        return None


def _uuid(ordinal: int) -> str:
    """Return a device's UUID as NVML writes it; CuPy's device properties end it at its first zero byte."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if library.cuDeviceGet(ctypes.byref(device), ordinal) or library.cuDeviceGetUuid_v2(raw, device):
        return f"unknown, number {ordinal}"
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def array_on(device_array: Array, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Array:
    """View part of a flat uint8 device array as another type, without a kernel."""
    dtype = np.dtype(dtype)
    return device_array[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
