"""What a driver said is found in an exception, and nothing else is taken from it."""

from __future__ import annotations

import pytest

from strata.errors import KernelError
from strata.runtime.driver_errors import driver_fields
from strata.runtime.memory import MemoryRefused


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    status = 700


def memcpy() -> None:
    check_status()


def check_status() -> None:
    raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def copy() -> None:
    try:
        memcpy()
    except RuntimeError as error:
        raise KernelError("copy", "it failed", "try again") from error


def test_a_cause_further_down_gives_call_number_and_name() -> None:
    with pytest.raises(KernelError) as caught:
        copy()
    assert driver_fields(caught.value) == {
        "code": "cudaErrorIllegalAddress: an illegal memory access was encountered",
        "call": "memcpy",
        "number": 700,
        "name": "cudaErrorIllegalAddress",
    }


def test_a_refusal_gives_what_it_holds() -> None:
    refusal = MemoryRefused("cudaMalloc", 2, "cudaErrorMemoryAllocation", "out of memory")
    assert driver_fields(refusal)["number"] == 2
    assert driver_fields(refusal)["code"] == "cudaMalloc: out of memory (2 cudaErrorMemoryAllocation)"


def test_other_errors_say_nothing_even_in_a_ring() -> None:
    error = ValueError("a prompt could be in here")
    error.__cause__ = RuntimeError("and here")
    error.__cause__.__context__ = error
    assert driver_fields(error) == {}
