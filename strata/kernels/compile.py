"""Compile the CUDA kernels with NVRTC, in parallel, and keep the results on disk. Needs no driver and no GPU.

One kernel, that is one template instantiation, is one cubin and one file in the cache. Its name is a hash of the
whole program text, headers included, of the instantiation, the architecture and the compiler's version.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from strata.errors import KernelError
from strata.folders import VARIABLE, cache_folder
from strata.kernels.codebooks import definitions

_SOURCES = Path(__file__).with_name("cuda")
_HEADERS = ("ptx.cuh", "common.cuh", "blocks.cuh", "blocks_k.cuh", "codebooks.cuh", "gemv.cuh", "heads.cuh", "kv.cuh")
_BUILT_ON = {"prompt_product": ("tensor.cuh",), "prompt_attention": ("tensor.cuh",)}  # in front of a family
_OPTIONS = ("-std=c++17", "--ptxas-options=-v", "--no-cache")  # NVRTC's own cache would withhold what ptxas says


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """One instantiation: `expression` names a kernel of ``cuda/<family>.cu``, as ``gather_rows<Q6_K>``."""

    family: str
    expression: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one kernel for one architecture, and what it takes.

    Attributes
    ----------
    cubin : bytes
    symbol : str
        The kernel's mangled name in `cubin`.
    registers : int
        Per thread.
    spilled : int
        Bytes a thread spills to local memory (stores and loads).
    seconds : float
        What compiling took, whenever that was.
    """

    cubin: bytes
    symbol: str
    registers: int
    spilled: int
    seconds: float


def compile_kernels(
    kernels: Collection[Kernel],
    arch: int,
    folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[Kernel, Compiled]:
    """Compile `kernels`, or take them from the cache.

    Parameters
    ----------
    kernels : collection of Kernel
    arch : int
        Compute capability, 90 for 9.0.
    folder : Path, optional
        The cache; by default ``kernels`` in the cache folder.
    progress : callable
        Called with the number of kernels that are ready and that of all.

    Raises
    ------
    KernelError
        With the compiler's words, when a kernel does not compile or NVRTC cannot be loaded.
    """
    folder = folder or cache_folder() / "kernels"
    ready: dict[Kernel, Compiled] = {}
    paths = {kernel: folder / f"{_key(kernel, arch)}.kernel" for kernel in kernels}
    for kernel, path in paths.items():
        found = _read(path)
        if found is not None:
            ready[kernel] = found
    progress(len(ready), len(paths))
    missing = [kernel for kernel in paths if kernel not in ready]
    if not missing:
        return ready
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        asked, remedy = f"keep compiled kernels in {folder}", f"Name a folder that can be written: {VARIABLE}=DIR"
        raise KernelError(asked, error.strerror or str(error), remedy) from None
    for kernel, compiled in _compile_all(missing, arch):
        ready[kernel] = compiled
        _write(paths[kernel], compiled)
        progress(len(ready), len(paths))
    return ready


def _compile_all(kernels: list[Kernel], arch: int) -> Iterator[tuple[Kernel, Compiled]]:
    if len(kernels) == 1:  # starting a process takes longer
        yield kernels[0], _compile(kernels[0], arch)
        return
    workers = min(len(kernels), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(_compile, kernel, arch): kernel for kernel in kernels}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


@cache
def sources_sha256() -> str:
    """Return a hash of everything that kernels are compiled from."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _program(kernel: Kernel) -> str:
    """Return a kernel's whole program, its headers in front."""
    return f"{definitions(kernel.expression)}\n{_sources(kernel.family)}"


@cache
def _sources(family: str) -> str:
    names = (*_HEADERS, *_BUILT_ON.get(family, ()), f"{family}.cu")
    texts = [(_SOURCES / name).read_text() for name in names]
    return "\n".join(texts).replace("#pragma once", "")


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc.nvrtcVersion(), "ask NVRTC for its version")
    except Exception as error:  # a missing library comes as ImportError, RuntimeError or the loader's own class
        raise KernelError(
            "load NVRTC, the CUDA run-time compiler",
            str(error).splitlines()[0],
            "Install it: `strata doctor` has the command for this driver.",
        ) from error
    return nvrtc


def _check(result: tuple[Any, ...], asked: str) -> Any:
    code, *values = result
    if int(code) != 0:
        raise KernelError(asked, str(code), "Run `strata doctor`; it checks the CUDA libraries.")
    return values[0] if len(values) == 1 else values


@cache
def _version() -> str:
    major, minor = _check(_nvrtc().nvrtcVersion(), "ask NVRTC for its version")
    return f"{major}.{minor}"


def _key(kernel: Kernel, arch: int) -> str:
    parts = (_program(kernel), kernel.expression, str(arch), _version(), *_OPTIONS)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _compile(kernel: Kernel, arch: int) -> Compiled:
    nvrtc = _nvrtc()
    asked = f"compile {kernel.expression} for sm_{arch}"
    started = time.perf_counter()
    check = partial(_check, asked=asked)
    name = kernel.expression.encode()
    program = check(nvrtc.nvrtcCreateProgram(_program(kernel).encode(), f"{kernel.family}.cu".encode(), 0, [], []))
    check(nvrtc.nvrtcAddNameExpression(program, name))
    options = [option.encode() for option in (f"--gpu-architecture=sm_{arch}", *_OPTIONS)]
    failed = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace").strip("\0 \n")
    if failed:
        raise KernelError(asked, text, "This is a mistake in Strata; please report it with this text.")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    symbol = check(nvrtc.nvrtcGetLoweredName(program, name)).decode()
    check(nvrtc.nvrtcDestroyProgram(program))
    registers = max(int(found) for found in re.findall(r"Used (\d+) registers", text))
    spilled = sum(int(found) for found in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))
    return Compiled(cubin, symbol, registers, spilled, time.perf_counter() - started)


def _read(path: Path) -> Compiled | None:
    """Read a cached kernel: a line of JSON, then the cubin. A file that was cut short counts as absent."""
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
    except (OSError, ValueError):
        return None
    if len(cubin) != facts.pop("bytes"):
        return None
    return Compiled(cubin, **facts)


def _write(path: Path, compiled: Compiled) -> None:
    facts = {
        "bytes": len(compiled.cubin),
        "symbol": compiled.symbol,
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "seconds": compiled.seconds,
    }
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(json.dumps(facts).encode() + b"\n" + compiled.cubin)
    Path(file.name).replace(path)
