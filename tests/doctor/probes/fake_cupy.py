"""Acts like CuPy on a simulated device whose memory is this process's: copies really copy, budgets really end."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
NO_MEMORY, NO_DEVICE = 2, 100


class CUDARuntimeError(RuntimeError):
    """As CuPy's: the code in `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeRuntime:
    """``cupy.cuda.runtime`` with one or more devices.

    Parameters
    ----------
    vram_bytes, pinned_bytes : int
        What the device and the system grant in total.
    largest_pin_bytes : int
        What one pin may be at most.
    refuse : dict
        Function -> CUDA code that every call of it fails with.
    shared : bool
        Pinned memory and device memory come out of one budget, as some Windows machines do.
    """

    is_hip = False
    devices = 1
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDefault = 1, 2, 4
    cudaDevAttrCanMapHostMemory, cudaDevAttrIntegrated = 19, 18

    def __init__(
        self,
        vram_bytes: int = 1024 * MIB,
        pinned_bytes: int = 1024 * MIB,
        largest_pin_bytes: int = 1 << 60,
        refuse: dict[str, int] | None = None,
        refusal: int = NO_MEMORY,
        shared: bool = False,
        corrupt: bool = False,
    ) -> None:
        self.refuse = refuse or {}
        self.calls: list[str] = []
        self.highest_pinned = 0
        self._vram, self._pinned, self._largest = vram_bytes, pinned_bytes, largest_pin_bytes
        self._refusal, self._shared, self._corrupt = refusal, shared, corrupt
        self._buffers: dict[int, Any] = {}
        self._device: dict[int, int] = {}
        self._locked: dict[int, int] = {}

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.refuse:
            raise CUDARuntimeError(self.refuse[call])

    def _new(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self._buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def _free_vram(self) -> int:
        pinned = sum(self._locked.values()) if self._shared else 0
        return self._vram - sum(self._device.values()) - pinned

    def _lock(self, size: int) -> None:
        taken = sum(self._device.values()) if self._shared else 0
        if size > self._largest or sum(self._locked.values()) + taken + size > self._pinned:
            raise CUDARuntimeError(self._refusal)

    def malloc(self, size: int) -> int:
        self._enter("malloc")
        if size > self._free_vram():
            raise CUDARuntimeError(NO_MEMORY)
        address = self._new(size)
        self._device[address] = size
        return address

    def free(self, address: int) -> None:
        self._enter("free")
        del self._device[address], self._buffers[address]

    def hostAlloc(self, size: int, flags: int) -> int:
        self._enter("hostAlloc")
        self._lock(size)
        address = self._new(size)
        self._locked[address] = size
        self.highest_pinned = max(self.highest_pinned, sum(self._locked.values()))
        return address

    def freeHost(self, address: int) -> None:
        self._enter("freeHost")
        del self._locked[address], self._buffers[address]

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self._enter("hostRegister")
        self._lock(size)
        self._locked[address] = size

    def hostUnregister(self, address: int) -> None:
        self._enter("hostUnregister")
        del self._locked[address]

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        self._enter("memcpy")
        ctypes.memmove(target, source, size)
        if self._corrupt and kind == self.memcpyDeviceToHost:
            ctypes.memset(target, 0, 1)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self._enter("memcpyAsync")
        ctypes.memmove(target, source, size)

    def memset(self, address: int, value: int, size: int) -> None:
        self._enter("memset")
        ctypes.memset(address, value, size)

    def memGetInfo(self) -> tuple[int, int]:
        self._enter("memGetInfo")
        return self._free_vram(), self._vram

    def getDeviceCount(self) -> int:
        self._enter("getDeviceCount")
        return self.devices

    def deviceGetAttribute(self, number: int, device: int) -> int:
        return {75: 8, 76: 9, 19: 1, 18: 0}[number]

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"NVIDIA GeForce RTX 4090"}

    def deviceGetPCIBusId(self, device: int) -> str:
        return "0000:01:00.0"

    def runtimeGetVersion(self) -> int:
        self._enter("runtimeGetVersion")
        return 13020

    def driverGetVersion(self) -> int:
        return 13000

    def setDevice(self, device: int) -> None:
        self._enter("setDevice")

    def deviceSynchronize(self) -> None:
        self._enter("deviceSynchronize")

    def streamCreateWithFlags(self, flags: int) -> int:
        return 1

    def streamSynchronize(self, stream: int) -> None:
        self._enter("streamSynchronize")


class FakeDriver:
    """libcuda's two functions that give a UUID, in which a zero byte is as good as any other."""

    uuid = bytes.fromhex("00112233445566778899aabbccddeeff")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0

    def cuDeviceGetUuid_v2(self, buffer: Any, device: Any) -> int:
        ctypes.memmove(buffer, self.uuid, 16)
        return 0


def fake_cupy(runtime: FakeRuntime, factor: int = 3, compile_error: Exception | None = None) -> Any:
    """Return what ``import cupy`` would: its kernels compute ``factor * thread + 1``."""

    def kernel(grid: tuple[int], block: tuple[int], arguments: tuple[int]) -> None:
        runtime._enter("launch")
        values = (ctypes.c_int * block[0])(*(factor * thread + 1 for thread in range(block[0])))
        ctypes.memmove(arguments[0], values, ctypes.sizeof(values))

    def raw_module(code: str, backend: str) -> Any:
        if compile_error is not None:
            raise compile_error
        return SimpleNamespace(get_function=lambda name: kernel)

    nvrtc = SimpleNamespace(getVersion=lambda: (13, 0), getSupportedArchs=lambda: (75, 80, 90, 100, 120))
    return SimpleNamespace(
        __version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc), RawModule=raw_module, uint64=int
    )
