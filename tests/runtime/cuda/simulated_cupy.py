"""A CuPy whose device is this process's RAM: what is allocated, copied and captured is real, kernels do nothing."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

UUID = "GPU-simulated"
ENTRY = "cudaErrorMemoryAllocation: out of memory"


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class DeviceArray(np.ndarray):
    """An array over given memory that says its address as CuPy's do."""

    def __new__(cls, shape: tuple[int, ...], dtype: Any, memptr: Any) -> DeviceArray:
        memory, offset = memptr
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert offset + nbytes <= memory.nbytes
        raw = (ctypes.c_ubyte * nbytes).from_address(memory.pointer + offset)
        return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape).view(cls)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Runtime:
    """The calls of cupy.cuda.runtime that are used; `blocks` and `pinned` are what is held."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, is_hip = 1, 2, 3, False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, np.ndarray] = {}
        self.pinned: dict[int, int] = {}
        self.refuse_pinning = False
        self.most_pinned: int | None = None
        self.copied: list[tuple[int, int]] = []  # kind and source of each copy
        self.moved_out: set[int] = set()  # first bytes of device memory that really lies behind the link

    def getDeviceCount(self) -> int:
        return 1

    def memGetInfo(self) -> tuple[int, int]:
        return self.capacity - sum(map(len, self.blocks.values())), self.capacity

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.memGetInfo()[0]:
            raise CUDARuntimeError(2, ENTRY)
        block = np.full(nbytes, 0xAB, np.uint8)
        self.blocks[block.ctypes.data] = block
        return int(block.ctypes.data)

    def free(self, pointer: int) -> None:
        del self.blocks[pointer]

    def memsetAsync(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(pointer, value, nbytes)

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.copied.append((kind, source))
        ctypes.memmove(to, source, nbytes)

    def hostRegister(self, pointer: int, nbytes: int, flags: int) -> None:
        if self.refuse_pinning or (
            self.most_pinned is not None and sum(self.pinned.values()) + nbytes > self.most_pinned
        ):
            raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
        self.pinned[pointer] = nbytes

    def hostUnregister(self, pointer: int) -> None:
        del self.pinned[pointer]

    def pointerGetAttributes(self, pointer: int) -> Any:
        locked = any(start <= pointer < start + nbytes for start, nbytes in self.pinned.items())
        return SimpleNamespace(devicePointer=pointer if locked else 0)

    def elapsed(self, started: Any, ended: Any) -> float:
        """Milliseconds of the last copy: 10 GB/s over the link, 100 within the device."""
        kind, source = self.copied[-1]
        block = max((start for start in self.blocks if start <= source), default=0)
        return 0.4 if kind == self.memcpyHostToDevice or block in self.moved_out else 0.04


class Stream:
    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self.capturing = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def synchronize(self) -> None:
        return

    def record(self) -> Stream:
        return self

    def begin_capture(self) -> None:
        assert not self.capturing
        self.capturing = True

    def end_capture(self) -> Any:
        assert self.capturing
        self.capturing = False
        return SimpleNamespace(launch=lambda stream: None)


class Device:
    compute_capability = "90"

    def __init__(self, ordinal: int = 0) -> None:
        self.attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}

    def use(self) -> None:
        return


@contextmanager
def simulated_cuda(monkeypatch: pytest.MonkeyPatch, capacity: int) -> Iterator[Runtime]:
    """Put a simulated CuPy in the place of the real one, as long as the block runs."""
    runtime = Runtime(capacity)
    cupy = ModuleType("cupy")
    stream = Stream()
    cupy.float16 = np.float16  # type: ignore[attr-defined]
    cupy.ndarray = DeviceArray  # type: ignore[attr-defined]
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        Stream=Stream,
        Device=Device,
        UnownedMemory=lambda pointer, nbytes, owner: SimpleNamespace(pointer=pointer, nbytes=nbytes),
        MemoryPointer=lambda memory, offset: (memory, offset),
        get_allocator=lambda: None,
        set_allocator=lambda allocator: None,
        get_current_stream=lambda: stream,
        get_elapsed_time=runtime.elapsed,
    )
    with monkeypatch.context() as patch:
        for name in list(sys.modules):
            if name.split(".")[0] in ("cupy", "cupy_backends") or name.startswith(
                ("strata.runtime.cuda.", "strata.kernels.cuda_ops", "strata.kernels.cuda_prompt")
            ):
                patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "cupy", cupy)
        for name, error in (("driver", "CUDADriverError"), ("runtime", "CUDARuntimeError")):
            module = ModuleType(f"cupy_backends.cuda.api.{name}")
            setattr(module, error, globals()[error])
            patch.setitem(sys.modules, module.__name__, module)
        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
            patch.setitem(sys.modules, name, ModuleType(name))
        try:
            import strata.kernels.cuda_ops as cuda_ops
            import strata.runtime.cuda.device as device

            idle = type("Idle", (), {"__call__": lambda self, *_: None, "unload": lambda self: None})
            patch.setattr(cuda_ops, "compile_kernels", lambda kernels, *_: dict.fromkeys(kernels))
            patch.setattr(cuda_ops, "LoadedKernel", lambda compiled, overlap: idle())
            patch.setattr(device, "_uuid", lambda ordinal: UUID)
            patch.setattr(device, "_driver_free", lambda uuid: runtime.memGetInfo()[0])
            yield runtime
        finally:
            for name in list(sys.modules):
                if name.startswith(("strata.runtime.cuda.", "strata.kernels.cuda_ops", "strata.kernels.cuda_prompt")):
                    del sys.modules[name]
