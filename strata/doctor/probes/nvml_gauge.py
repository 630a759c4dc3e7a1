"""Reads a device's memory through NVML beside CUDA: it sees the device before a context of ours is there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.nvml import ask, bus_id


class NvmlGauge:
    """NVML's view of the devices, for matching and measuring.

    Parameters
    ----------
    nvml : module or None
        pynvml, started; None where NVML does not work.
    why_not : str
        The reason when it is None.
    """

    def __init__(self, nvml: Any, why_not: str = "") -> None:
        self._nvml = nvml
        self._why_not = why_not

    @classmethod
    @contextmanager
    def open(cls, missing: str | None) -> Iterator[NvmlGauge]:
        """Start NVML for as long as the block runs; without NVML the gauge knows nothing, and says why.

        Parameters
        ----------
        missing : str, optional
            Why NVML must not be touched: where it hung or crashed before, it would again.
        """
        if missing is not None:
            yield cls(None, missing)
            return
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as failure:
            yield cls(None, f"NVML does not start: {failure}")
            return
        try:
            yield cls(nvml)
        finally:
            nvml.nvmlShutdown()

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._nvml is None:
            raise Unknown(self._why_not)
        return ask(self._nvml, function, *arguments)

    def _handle(self, index: int | None) -> Any:
        if index is None:
            raise Unknown("the device was not found in NVML")
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def index(self, uuid: str | None, pci_bus_id: str) -> int:
        """Return NVML's number for a CUDA device: the one with its UUID, or for a MIG slice the card it is on."""
        handles = [self._handle(index) for index in range(self._ask("nvmlDeviceGetCount"))]
        uuids = [self._ask("nvmlDeviceGetUUID", handle) for handle in handles]
        if uuid in uuids:
            return uuids.index(uuid)
        buses = [bus_id(self._ask("nvmlDeviceGetPciInfo", handle)) for handle in handles]
        if pci_bus_id.lower() in buses:
            return buses.index(pci_bus_id.lower())
        raise Unknown(f"NVML lists no device with UUID {uuid} or bus id {pci_bus_id}")

    def used_bytes(self, index: int | None) -> int:
        """Return the device memory in use by everyone."""
        return int(self._ask("nvmlDeviceGetMemoryInfo", self._handle(index)).used)

    def link(self, index: int | None) -> tuple[int, int]:
        """Return the PCIe generation and width at this moment."""
        handle = self._handle(index)
        return (
            self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        )
