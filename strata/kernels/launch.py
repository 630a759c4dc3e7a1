"""Load compiled kernels into the device and launch them, each while its predecessor still runs.

Launches go through the driver because CuPy has no programmatic dependent launch: from sm_90 on, a kernel may then
start, and fetch weights, before the one in front of it has finished (see ``cuda/ptx.cuh``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from strata.errors import KernelError
from strata.kernels.compile import Compiled

Argument = ctypes.Structure | ctypes._SimpleCData  # type: ignore[type-arg]

_SHARED_LIMIT = 48 << 10  # of a block, static and dynamic together; more dynamic memory has to be asked for


class LoadedKernel:
    """One kernel on the current device.

    Parameters
    ----------
    compiled : Compiled
    overlap : bool
        Whether it may start before its predecessor ends (compute capability 9.0 or newer).
    """

    def __init__(self, compiled: Compiled, overlap: bool) -> None:
        self.registers = compiled.registers
        self._symbol = compiled.symbol
        self._module = self._check(driver.cuModuleLoadData(compiled.cubin))
        self._function = self._check(driver.cuModuleGetFunction(self._module, compiled.symbol.encode()))
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self._shared = _SHARED_LIMIT - int(self._check(driver.cuFuncGetAttribute(static, self._function)))
        self._attributes = []
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._attributes = [attribute]

    def __call__(
        self, grid: tuple[int, ...], threads: int, arguments: Sequence[Argument], stream: int, shared: int = 0
    ) -> None:
        """Launch on `stream` (a CUstream handle) with `shared` bytes of dynamic shared memory."""
        if shared > self._shared:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(self._function, limit, shared))
            self._shared = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = stream
        config.attrs = self._attributes
        config.numAttrs = len(self._attributes)
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(addresses), 0))

    def unload(self) -> None:
        """Give its memory back. A device that is lost has lost this, too."""
        driver.cuModuleUnload(self._module)

    def _check(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise KernelError(f"run the kernel {self._symbol}", str(code), "Run `strata doctor`.")
        return values[0] if values else None
