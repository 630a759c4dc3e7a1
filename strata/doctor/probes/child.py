"""The child process of one probe group: ``python -m strata.doctor.probes.child GROUP RESULT_FILE < request``.

Results go to a file of the parent's, one JSON line each time the probe knows more, so that neither noise on
stdout nor a crash half-way loses what was found.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from strata.doctor.cuda_codes import cuda_error
from strata.doctor.facts import ProbeError, ProbeStatus
from strata.doctor.probes.request import ProbeRequest, ProbeStopped, Record

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_probe(facts: Iterator[msgspec.Struct], results: BinaryIO) -> None:
    """Write each state of the facts that the probe yields, then how it ended."""
    value: msgspec.Struct | None = None
    status, error = ProbeStatus.OK, None
    try:
        for value in facts:
            _write(results, Record(value=value))
    except ProbeStopped as stop:
        status, error = stop.status, stop.error
    except Exception as failure:  # noqa: BLE001 - the process boundary: it becomes the probe's failure
        traceback.print_exc()
        status, error = ProbeStatus.FAILED, cuda_error(failure)
    if value is None and status is ProbeStatus.OK:
        status, error = ProbeStatus.FAILED, ProbeError(message="the probe reported nothing")
    _write(results, Record(value=value, status=status, error=error))


def _write(results: BinaryIO, record: Record) -> None:
    results.write(msgspec.json.encode(record) + b"\n")
    results.flush()


def main() -> None:
    """Run the probe named on the command line."""
    group, result_path = sys.argv[1:]
    _end_with_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    module = importlib.import_module(f"strata.doctor.probes.{group}")
    with Path(result_path).open("ab") as results:
        run_probe(module.probe(request), results)
    sys.stderr.flush()
    os._exit(0)  # the result is safe: a driver that crashes or hangs in its own teardown must not matter


def _end_with_parent() -> None:
    """Have Linux end this process with its parent: memory must not stay taken for someone who was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
