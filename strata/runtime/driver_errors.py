"""What a driver said when a run broke: found in the exception, or in one of those that led to it.

Only the driver's own words are taken. They name calls and codes; no prompt and no answer can be among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from strata.runtime.memory import MemoryRefused

_CUPY = ("CUDARuntimeError", "CUDADriverError")  # told by name: this module never imports CuPy
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
