"""Acts like the module pynvml for a driver whose every answer is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 4, 12, 15
_TEXTS = {3: "Not Supported", 4: "Insufficient Permissions", 12: "NVML Shared Library Not Found", 15: "GPU is lost"}


class NVMLError(Exception):
    """As pynvml's: the number in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(_TEXTS.get(value, f"NVML Error with code {value}"))
        self.value = value


def memory(total: int, free: int, reserved: int = 0) -> SimpleNamespace:
    return SimpleNamespace(total=total, free=free, used=total - free - reserved, reserved=reserved)


def rtx4090(**changes: Any) -> dict[str, Any]:
    """Return the answers of one card, keyed by function; an int in `changes` with the key's ``error_`` is a refusal."""
    return {
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlDeviceGetUUID": "GPU-00112233-4455-6677-8899-aabbccddeeff",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:01:00.0"),
        "nvmlDeviceGetMemoryInfo": memory(24 * GIB, 22 * GIB, GIB // 2),
        "nvmlDeviceGetCurrentDriverModel": NVMLError(NOT_SUPPORTED),
        "nvmlDeviceGetCudaComputeCapability": (8, 9),
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetDisplayActive": 1,
        "nvmlDeviceGetDisplayMode": 1,
        "nvmlDeviceGetPersistenceMode": 0,
        "nvmlDeviceGetCurrentEccMode": NVMLError(NOT_SUPPORTED),
        "nvmlDeviceGetMigMode": NVMLError(NOT_SUPPORTED),
        "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=GIB // 4, bar1Free=GIB // 8),
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetClockInfo": 210,
        "nvmlDeviceGetMaxClockInfo": 3105,
        "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetPowerUsage": 21_500,
        "nvmlDeviceGetEnforcedPowerLimit": 450_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 450_000,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=GIB)],
        "nvmlDeviceGetGraphicsRunningProcesses": [
            SimpleNamespace(pid=7, usedGpuMemory=GIB),
            SimpleNamespace(pid=3, usedGpuMemory=None),
        ],
        **changes,
    }


class FakeNvml:
    """The module's functions, answered from `cards`; an exception among the answers is raised."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x2000028

    def __init__(self, *cards: dict[str, Any], init_error: int | None = None, **system: Any) -> None:
        self._cards = cards
        self._init_error = init_error
        self._system = {
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetCount": len(cards),
            **system,
        }

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise NVMLError(self._init_error)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        card = self._cards[index]
        if "handle" in card:
            raise card["handle"]
        return card

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 3:
            raise NVMLError(NO_PERMISSION)
        return f"/usr/bin/process{pid}"

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any, **options: Any) -> Any:
            found = arguments[0].get(name, AttributeError(name)) if arguments else self._system[name]
            if isinstance(found, Exception):
                raise found
            return found

        return answer
