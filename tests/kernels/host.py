"""The CUDA kernels on a CPU: their own sources, compiled by a C++ compiler with `simt.h`, behind the same `CudaOps`."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.kernels import compile as cuda
from strata.kernels.codebooks import definitions
from strata.kernels.compile import Kernel
from tests.runtime.cuda.simulated_cupy import DeviceArray, simulated_cuda

COMPILER = shutil.which("g++")
NEEDED = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs g++ and Linux's coroutines"
)
_HEADER = Path(__file__).with_name("simt.h")
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-U_FORTIFY_SOURCE")

Found = tuple[Path, str]  # library and the name of a kernel's launcher in it


def compile_for_host(kernels: Collection[Kernel], folder: Path) -> dict[Kernel, Found]:
    """Compile kernels to libraries of several in parallel."""
    families = defaultdict(list)
    for kernel in sorted(kernels):
        families[kernel.family].append(kernel.expression)
    parts = [
        (family, expressions[start : start + 14])
        for family, expressions in families.items()
        for start in range(0, len(expressions), 14)
    ]
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(lambda part: _library(*part, folder), parts))
    return {
        Kernel(family, expression): (library, f"launch_{i}")
        for (family, expressions), library in zip(parts, libraries, strict=True)
        for i, expression in enumerate(expressions)
    }


def _library(family: str, expressions: Sequence[str], folder: Path) -> Path:
    headers = [(cuda._SOURCES / name).read_text() for name in cuda._HEADERS if name != "ptx.cuh"]
    headers += [(cuda._SOURCES / name).read_text() for name in cuda._BUILT_ON.get(family, ())]
    source = (cuda._SOURCES / f"{family}.cu").read_text()
    launchers = [
        f'extern "C" void launch_{i}(const u32* grid, u32 threads, void** arguments, u32 shared) {{\n'
        f"  simt::run({expression}, grid, threads, arguments, shared);\n}}"
        for i, expression in enumerate(expressions)
    ]
    text = "\n".join([_HEADER.read_text(), definitions(" ".join(expressions)), *headers, source, *launchers])
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
    text = re.sub(dynamic, r"\1* \2 = (\1*)simt::dynamic_shared();", text)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        whole = path.with_suffix(".cpp")
        whole.write_text(text.replace("#pragma once", ""))
        assert COMPILER
        done = subprocess.run([COMPILER, *_OPTIONS, "-o", path, whole], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
    return path


class Capture:
    """A stream's capture: while it is open, launches are noted in place of being run."""

    def __init__(self) -> None:
        self.open: list[Callable[[], None]] | None = None

    def begin(self) -> None:
        assert self.open is None
        self.open = []

    def end(self) -> Any:
        launches, self.open = self.open, None
        assert launches is not None
        return SimpleNamespace(launch=lambda stream: [launch() for launch in launches])


class HostKernel:
    """Stands in for `strata.kernels.launch.LoadedKernel`."""

    def __init__(self, found: Found, capture: Capture) -> None:
        path, name = found
        self._launch = getattr(ctypes.CDLL(str(path)), name)
        self._capture = capture

    def __call__(
        self, grid: tuple[int, ...], threads: int, arguments: Sequence[Any], stream: int, shared: int = 0
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))

        def launch(values: Sequence[Any] = arguments) -> None:  # which keeps them: a captured one runs later
            self._launch((ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]), threads, addresses, shared)

        if self._capture.open is None:
            launch()
        else:
            self._capture.open.append(launch)

    def unload(self) -> None:
        """Do nothing: the library stays."""


@contextmanager
def kernels_on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, capacity: int = 1 << 30) -> Iterator[Any]:
    """Put a CuPy in the place of the real one whose kernels run on this CPU; yields `strata.kernels.cuda_ops`."""

    def compiled(kernels: Collection[Kernel], arch: int, cache: Path | None = None, *_: Callable[..., None]) -> Any:
        return compile_for_host(kernels, folder)

    with simulated_cuda(monkeypatch, capacity), monkeypatch.context() as patch:
        cupy = sys.modules["cupy"]
        for name in ("uint8", "uint32", "int8", "int32", "float16", "float32", "nan"):
            setattr(cupy, name, getattr(np, name))
        cupy.asarray = lambda values, dtype=None: on_host(np.asarray(values, dtype))  # type: ignore[attr-defined]
        cupy.asnumpy = np.array  # type: ignore[attr-defined]
        cupy.full = lambda shape, value, dtype: on_host(np.full(shape, value, dtype))  # type: ignore[attr-defined]
        cupy.zeros = lambda shape, dtype: on_host(np.zeros(shape, dtype))  # type: ignore[attr-defined]
        cupy.empty = lambda shape, dtype: on_host(np.full(shape, 0xAA, dtype))  # type: ignore[attr-defined]
        from strata.kernels import cuda_ops

        patch.setattr(cuda_ops, "compile_kernels", compiled)
        capture = Capture()
        patch.setattr(cuda_ops, "LoadedKernel", lambda found, overlap: HostKernel(found, capture))
        patch.setattr(cupy.cuda.Stream, "begin_capture", lambda stream: capture.begin())
        patch.setattr(cupy.cuda.Stream, "end_capture", lambda stream: capture.end())
        yield cuda_ops


def on_host(array: np.ndarray) -> Any:
    """Return a copy of an array that passes for one on the device, aligned as there."""
    raw = np.empty(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape).view(DeviceArray)
    out[...] = array
    return out
