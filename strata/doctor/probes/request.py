"""What a probe is asked, and how it says that it had to stop. Shared by the parent and the children."""

from __future__ import annotations

from typing import Any

import msgspec

from strata.doctor.facts import ProbeError, ProbeStatus

MIB = 1 << 20
LARGE_CHUNK = 256 * MIB  # page-locked memory is taken in pieces of this, or of
SMALL_CHUNK = 64 * MIB  # this where little is asked for
LEFT_FREE_BYTES = 256 * MIB  # device memory that the ballast must leave: VRAM is never probed to exhaustion


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options that reach the children. Every probe reads what concerns it."""

    model: str | None = None  # absolute path of the model file, for the disk probe
    device: int = 0  # CUDA ordinal that the pinned and speed probes use
    pin_bytes: int = 0  # where the pinned probe stops by itself
    ballast_bytes: int = 0  # device memory that the pinned probe holds while it pins
    ram_bytes: int = 0  # largest buffer that the speed probe may fill
    nvml_missing: str | None = None  # why the CUDA probes must leave NVML alone; None when they may use it
    cuda_missing: str | None = None  # why the speed probe must leave the device alone; None when it may use it


class ProbeStopped(Exception):
    """Raised by a probe that cannot go on; what it had yielded until then is kept.

    Parameters
    ----------
    status : ProbeStatus
        ``UNSUPPORTED``, ``FAILED`` or ``SKIPPED``.
    error : ProbeError
        Why.
    """

    def __init__(self, status: ProbeStatus, error: ProbeError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a child's result file. The last whole line counts."""

    value: Any = None
    status: ProbeStatus | None = None  # None while the probe is still at work
    error: ProbeError | None = None
