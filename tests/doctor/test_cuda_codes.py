from __future__ import annotations

import pytest

from strata.doctor.cuda_codes import NAMES, TEXTS, cuda_error
from strata.doctor.facts import ProbeError


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__("cudaErrorSomething: text of the library")
        self.status = status


class NVRTCError(RuntimeError):
    status = 5


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (2, "cudaErrorMemoryAllocation"),
        (35, "cudaErrorInsufficientDriver"),
        (46, "cudaErrorDevicesUnavailable"),
        (100, "cudaErrorNoDevice"),
        (209, "cudaErrorNoKernelImageForDevice"),
        (222, "cudaErrorUnsupportedPtxVersion"),
        (802, "cudaErrorSystemNotReady"),
        (803, "cudaErrorSystemDriverMismatch"),
        (804, "cudaErrorCompatNotSupportedOnDevice"),
        (999, "cudaErrorUnknown"),
    ],
)
def test_codes_people_meet_have_name_and_text(code: int, name: str) -> None:
    assert cuda_error(CUDARuntimeError(code), "call") == ProbeError(TEXTS[code], code, name, "call")


def test_code_without_a_text_keeps_the_librarys() -> None:
    assert cuda_error(CUDARuntimeError(714)).message == "cudaErrorSomething: text of the library"
    assert cuda_error(CUDARuntimeError(123456)).name is None


def test_other_libraries_numbers_are_not_taken_for_cudas() -> None:
    assert cuda_error(NVRTCError("bad option")) == ProbeError("bad option", 5, "NVRTCError")


def test_system_errors() -> None:
    assert cuda_error(FileNotFoundError(2, "gone")).code == 2
    assert cuda_error(MemoryError()) == ProbeError("MemoryError", None, "MemoryError")


def test_every_text_has_its_name() -> None:
    assert TEXTS.keys() <= NAMES.keys()
    assert len(set(NAMES.values())) == len(NAMES)
