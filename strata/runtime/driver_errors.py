"""What a driver said when a run broke, found in the exception or in one of those that led to it, and what it means.

Only the driver's own words are taken. They name calls and codes; no prompt and no answer can be among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from strata.runtime.memory import MemoryRefused

_CUPY = ("CUDARuntimeError", "CUDADriverError")  # told by name: this module never imports CuPy
_PLENTY = 64  # times the little that was asked for: free memory that a refusal of it cannot be for want of
_CHECKS = ("check_status", "check_attribute_status")  # where CuPy turns a code into an exception


def driver_fields(error: BaseException) -> dict[str, Any]:
    """Return the fields that a run's log has for a broken run: `code` (in words), `call`, `number` and `name`.

    Returns
    -------
    dict
        Empty where no driver had a part in it.
    """
    for cause in _chain(error):
        if isinstance(cause, MemoryRefused):
            return {"code": str(cause), "call": cause.call, "number": cause.code, "name": cause.name}
        status = getattr(cause, "status", None)
        if type(cause).__name__ in _CUPY and isinstance(status, int):
            return {
                "code": str(cause),  # "cudaErrorIllegalAddress: an illegal memory access was encountered"
                "call": _innermost_call(cause.__traceback__),
                "number": status,
                "name": str(cause).partition(":")[0],
            }
    return {}


def refuses_all(code: int | None, *, out_of_memory: int, held_bytes: int, free_bytes: int | None, little: int) -> bool:
    """Say whether a device works no more, from how it answered when asked for a little of its memory.

    A code other than "out of memory" says so. So does that one while nothing of the device is held and the driver has
    many times as much free: CUDA answers it, too, where it cannot start, as under a limit on address space.

    Parameters
    ----------
    code : int or None
        Of the refusal; None where the little was granted.
    out_of_memory : int
        The code for a memory that is full.
    held_bytes : int
        Of device and page-locked memory, by this process: with something held the device did work, and what is held may
        be what the refusal comes from.
    free_bytes : int or None
        By the driver's count; None where it does not answer.
    little : int
        Bytes that were asked for.
    """
    if code is None or code != out_of_memory:
        return code is not None
    return not held_bytes and free_bytes is not None and free_bytes >= _PLENTY * little


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _innermost_call(trace: TracebackType | None) -> str | None:
    """Return the function that failed: "launchKernel". CuPy's compiled functions leave frames like any other."""
    name = None
    while trace is not None:
        last = trace.tb_frame.f_code.co_name.rpartition(".")[2]
        name = name if last in _CHECKS else last
        trace = trace.tb_next
    return name
