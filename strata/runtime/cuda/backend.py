"""The CUDA backend: a device, and loading onto it."""

from __future__ import annotations

from typing import Self

from strata.doctor.plan import AllocationPlan
from strata.gguf.reader import GGUFFile
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.cuda.loader import load_cuda
from strata.runtime.loader import LoadedModel, LoadOptions
from strata.runtime.memory import PlannedMemory
from strata.runtime.models import ModelConfig


class CudaBackend:
    """Implements `strata.runtime.loader.Backend` on the GPU with a UUID."""

    def __init__(self, uuid: str) -> None:
        self._device = CudaDevice.open(uuid)
        self.take = self._device.take
        self.vram = self._device.vram

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.close()

    def load(
        self, file: GGUFFile, config: ModelConfig, plan: AllocationPlan, memory: PlannedMemory, load: LoadOptions
    ) -> LoadedModel:
        """See `Backend.load`."""
        return load_cuda(file, config, plan, memory, self._device, load)
