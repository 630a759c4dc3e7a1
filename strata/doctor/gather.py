"""Gathers the facts of this machine: which probes run, in what order, with what limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import strata
from strata.doctor.facts import (
    AdapterFacts,
    CudaFacts,
    DiskFacts,
    Facts,
    HostFacts,
    NvmlFacts,
    PinnedFacts,
    Probe,
    ProbeError,
    ProbeStatus,
    SpeedFacts,
)
from strata.doctor.probes.request import ProbeRequest
from strata.doctor.probes.runner import probe_job, run_jobs

GROUPS: dict[str, type[msgspec.Struct]] = {
    "host": HostFacts,
    "nvml": NvmlFacts,
    "adapters": AdapterFacts,
    "disk": DiskFacts,
    "cuda": CudaFacts,
    "pinned": PinnedFacts,
    "speed": SpeedFacts,
}
TIME_LIMITS_S = {
    "host": 10.0,
    "nvml": 10.0,
    "adapters": 10.0,
    "disk": 20.0,
    "cuda": 30.0,
    "pinned": 30.0,
    "speed": 40.0,
}

QUICK_PIN_BYTES = 2 << 30
QUICK_PIN_SHARE = 0.25  # of the RAM that is available: a pin takes RAM away from everyone else
DEEP_PIN_SHARE = 0.9
SECOND_PIN_BYTES = 64 << 20
SLOWEST_PIN_BYTES_PER_S = 0.5e9  # touching, copying there and back; sets the deep probe's time limit
RAM_BUFFER_BYTES = 256 << 20
RAM_BUFFER_SHARE = 0.125


@dataclass(frozen=True)
class GatherWatch:
    """Whom to tell while probes run; each is called in the thread that gathers.

    Parameters
    ----------
    started : callable
        The groups that run now, and the seconds after which all of them are stopped.
    state : callable
        A group and what its probe knows by now (None at first), several times a second.
    ended : callable
        A group and how its probe ended.
    """

    started: Callable[[Sequence[str], float], None] = lambda groups, limit_s: None
    state: Callable[[str, Any], None] | None = None
    ended: Callable[[str, ProbeStatus], None] = lambda group, status: None


def pinned_limit_s(nbytes: int) -> float:
    """Return how long page-locking `nbytes` may take, each touched and copied there and back."""
    return TIME_LIMITS_S["pinned"] + nbytes / SLOWEST_PIN_BYTES_PER_S


@dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """What to gather.

    Parameters
    ----------
    groups : tuple of str
        Names from `GROUPS`; the others are reported as skipped.
    model : Path, optional
        The model file whose disk is measured.
    device : int
        CUDA ordinal for the pinned and speed probes.
    gpu : str, optional
        Instead of it a GPU by its number in nvidia-smi or its UUID, as people name it; one that is not there leaves
        `device` as it is.
    deep_pin_bytes : int, optional
        Pin up to this much instead of the quick probe's small amount.
    ballast_bytes : int
        Device memory to hold, touched, while pinning.
    time_limits_s : mapping
        Per group, instead of `TIME_LIMITS_S`.
    """

    groups: tuple[str, ...] = tuple(GROUPS)
    model: Path | None = None
    device: int = 0
    gpu: str | None = None
    deep_pin_bytes: int | None = None
    ballast_bytes: int = 0
    time_limits_s: Mapping[str, float] = field(default_factory=dict)


def gather(options: GatherOptions | None = None, watch: GatherWatch | None = None) -> Facts:
    """Probe this machine and return its facts.

    Every probe runs in a child of its own. The driver is asked before any of our contexts exists, and the probes
    that pin memory or measure speed run alone.

    Parameters
    ----------
    options : GatherOptions, optional
        The quick probes of every group by default.
    watch : GatherWatch, optional
    """
    gathering = _Gathering(options or GatherOptions(), watch or GatherWatch())
    return gathering.run()


class _Gathering:
    def __init__(self, options: GatherOptions, watch: GatherWatch) -> None:
        self._options = options
        self._watch = watch
        self._limits_s = TIME_LIMITS_S | dict(options.time_limits_s)
        self._probes: dict[str, Any] = {}
        self._device = options.device

    def run(self) -> Facts:
        options = self._options
        for group in GROUPS:
            if group not in options.groups:
                self._skip(group, "this group was not asked for")
        if options.model is None:
            self._skip("disk", "no model was given")
        model = None if options.model is None else str(options.model.absolute())
        request = ProbeRequest(model=model, device=options.device, ballast_bytes=options.ballast_bytes)

        self._run(request, "host", "nvml", "adapters", "disk")
        request = msgspec.structs.replace(request, nvml_missing=self._why_no_nvml())
        self._run(request, "cuda")
        self._device = self._find_device()
        request = msgspec.structs.replace(request, device=self._device)
        no_device = self._why_no_device()
        if no_device is None:
            self._pin(request)
        else:
            self._skip("pinned", no_device)
        ram_bytes = min(RAM_BUFFER_BYTES, int(self._available_bytes() * RAM_BUFFER_SHARE))
        self._run(msgspec.structs.replace(request, ram_bytes=ram_bytes, cuda_missing=no_device), "speed")
        return Facts(
            strata_version=strata.__version__,
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **self._probes,
        )

    def _skip(self, group: str, why: str) -> None:
        self._probes.setdefault(group, Probe(status=ProbeStatus.SKIPPED, error=ProbeError(message=why)))

    def _run(self, request: ProbeRequest, *groups: str) -> None:
        """Run those of `groups` that have no outcome yet, side by side."""
        jobs = [probe_job(group, request, self._limits_s[group]) for group in groups if group not in self._probes]
        if jobs:
            self._watch.started([job.group for job in jobs], max(job.time_limit_s for job in jobs))
        outcomes = run_jobs(
            jobs,
            on_done=lambda group, probe: self._watch.ended(group, probe.status),
            on_state=self._watch.state,
        )
        for group, outcome in outcomes.items():
            self._probes[group] = _decode(outcome, GROUPS[group])

    def _find_device(self) -> int:
        """Return CUDA's number of the GPU that the pinned and speed probes use."""
        wanted, cuda = (self._options.gpu or "").lower(), self._probes["cuda"].value
        for device in cuda.devices if cuda is not None else ():
            index = device.ordinal if device.nvml_index is None else device.nvml_index
            if wanted in (str(index), device.uuid and device.uuid.lower()):
                return int(device.ordinal)
        return self._options.device

    def _why_no_nvml(self) -> str | None:
        """Return why the CUDA probes must not touch NVML, or None."""
        nvml: Probe[NvmlFacts] = self._probes["nvml"]
        if "nvml" not in self._options.groups or nvml.status is ProbeStatus.OK:
            return None
        return f"the nvml probe did not succeed: {nvml.error.message if nvml.error else nvml.status}"

    def _why_no_device(self) -> str | None:
        """Return why the probes that need a working device cannot run, or None."""
        cuda: Probe[CudaFacts] = self._probes["cuda"]
        if "cuda" not in self._options.groups:
            return None  # nothing is known against it
        if cuda.status is not ProbeStatus.OK or cuda.value is None:
            return f"the cuda probe did not succeed: {cuda.error.message if cuda.error else cuda.status}"
        device = next((device for device in cuda.value.devices if device.ordinal == self._device), None)
        if device is None:
            return f"CUDA shows no device {self._device}"
        return f"device {device.ordinal} cannot be used: {device.error.message}" if device.error else None

    def _available_bytes(self) -> int:
        """Return the RAM that may be taken now, a container's and the process's limits included; 0 when unknown."""
        host = self._probes["host"].value
        if host is None or host.ram_available_bytes is None:
            return 0
        room: int = host.ram_available_bytes
        if host.cgroup_limit_bytes is not None and host.cgroup_used_bytes is not None:
            room = min(room, host.cgroup_limit_bytes - host.cgroup_used_bytes + (host.cgroup_reclaimable_bytes or 0))
        if host.address_space_limit_bytes is not None and host.address_space_used_bytes is not None:
            room = min(room, host.address_space_limit_bytes - host.address_space_used_bytes)
        return max(room, 0)

    def _pin(self, request: ProbeRequest) -> None:
        """Run the pinned probe, and once more in a fresh process when nothing at all worked in the first."""
        deep = self._options.deep_pin_bytes
        share = QUICK_PIN_SHARE if deep is None else DEEP_PIN_SHARE
        target = min(QUICK_PIN_BYTES if deep is None else deep, int(self._available_bytes() * share))
        request = msgspec.structs.replace(request, pin_bytes=target)
        if "pinned" not in self._options.time_limits_s:
            self._limits_s["pinned"] = pinned_limit_s(target)
        self._run(request, "pinned")
        first: Probe[PinnedFacts] = self._probes["pinned"]
        if first.value is not None and first.value.malloc_after_refusal_ok is False:
            del self._probes["pinned"]
            self._run(msgspec.structs.replace(request, pin_bytes=min(target, SECOND_PIN_BYTES)), "pinned")
            second: Probe[PinnedFacts] = self._probes["pinned"]
            works = second.value is not None and second.value.granted_bytes > 0
            value = msgspec.structs.replace(first.value, fresh_process_ok=works)
            self._probes["pinned"] = msgspec.structs.replace(first, value=value)


def _decode(outcome: Probe[Any], facts_type: type[msgspec.Struct]) -> Probe[Any]:
    if outcome.value is None:
        return outcome
    try:
        value = msgspec.convert(outcome.value, facts_type, str_keys=True)
    except msgspec.MsgspecError as failure:
        error = ProbeError(message=f"the result could not be read: {failure}")
        return Probe(status=ProbeStatus.CRASHED, error=error, seconds=outcome.seconds)
    return msgspec.structs.replace(outcome, value=value)
