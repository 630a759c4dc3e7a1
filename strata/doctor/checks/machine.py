"""What a check sees: one machine's facts, and the model, plan and options when there are any.

A group whose probe did not succeed reads as an empty one, so a check needs no cases for it: everything in it is
None. Numbers that no machine can have (negative, NaN) read as None too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from strata.doctor.cuda_packages import remedy_for
from strata.doctor.facts import (
    AdapterFacts,
    CudaFacts,
    DiskFacts,
    Facts,
    HostFacts,
    NvmlFacts,
    NvmlGpu,
    PinnedFacts,
    Probe,
    ProbeError,
    ProbeStatus,
    RunFacts,
    SpeedFacts,
)
from strata.doctor.findings import Evidence
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.units import version
from strata.gguf.model_facts import ModelFacts

GROUPS = ("host", "nvml", "cuda", "pinned", "disk", "adapters", "speed", "run")
NO_LIMIT = "no limit"  # the reason that makes a None an answer
NOT_REPORTED = "not reported"
# Reasons that are answers: the thing does not exist on this system, or on this device.
NOT_HERE = re.compile(r"not supported|^windows (?:has|keeps) no|^only (?:windows|linux)\b", re.IGNORECASE)
WHERE = {  # the source of a group's facts, where the facts do not say it more exactly
    "host": "operating system",
    "nvml": "NVML",
    "cuda": "CUDA in a child process",
    "pinned": "pinning probe",
    "disk": "file system",
    "adapters": "display adapters",
    "speed": "speed probe",
    "run": "log of the last run",
    "plan": "allocation plan",
    "model": "model header",
}
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Missing:
    """A fact that is not there, and why."""

    path: str
    reason: str
    not_here: bool = False  # the thing it describes does not exist on this machine: an answer, not a gap
    not_asked: bool = False  # left out by choice, or for want of a model or plan


@dataclass(frozen=True)
class Machine:
    """The input of every check."""

    facts: Facts
    model: ModelFacts | None = None
    plan: AllocationPlan | None = None
    options: PlanOptions = field(default_factory=PlanOptions)

    @cached_property
    def host(self) -> HostFacts:
        return _believable(self.facts.host.value or HostFacts())

    @cached_property
    def nvml(self) -> NvmlFacts:
        return _believable(self.facts.nvml.value or NvmlFacts())

    @cached_property
    def cuda(self) -> CudaFacts:
        return _believable(self.facts.cuda.value or CudaFacts())

    @cached_property
    def pinned(self) -> PinnedFacts | None:
        """None unless the probe ran to an answer: its counts start at 0, which must not be taken for a measurement."""
        probe = self.facts.pinned
        finished = probe.status in (ProbeStatus.OK, ProbeStatus.FAILED)
        return probe.value if finished and probe.value and _believable(probe.value) == probe.value else None

    @cached_property
    def disk(self) -> DiskFacts:
        return _believable(self.facts.disk.value or DiskFacts())

    @cached_property
    def adapters(self) -> AdapterFacts:
        return _believable(self.facts.adapters.value or AdapterFacts())

    @cached_property
    def speed(self) -> SpeedFacts:
        return _believable(self.facts.speed.value or SpeedFacts())

    @cached_property
    def last_run(self) -> RunFacts:
        return _believable(self.facts.run.value or RunFacts())

    @cached_property
    def gpus(self) -> dict[str, NvmlGpu]:
        """The driver's GPUs by what a person calls them: ``"GPU 0 (NVIDIA GeForce RTX 4090)"``."""
        return {f"GPU {gpu.index} ({gpu.name or 'name unknown'})": gpu for gpu in self.nvml.gpus}

    @cached_property
    def cuda_errors(self) -> tuple[tuple[str, ProbeError], ...]:
        """Every CUDA error that a probe or the last run met, with the group that met it."""
        cuda, pinned = self.facts.cuda, self.facts.pinned
        tried = (ProbeStatus.FAILED, ProbeStatus.UNSUPPORTED)
        found = [("cuda", cuda.error if cuda.status in tried else None)]
        found += [("cuda", device.error) for device in self.cuda.devices]
        found += [("cuda", self.cuda.kernel_error), ("pinned", pinned.error if pinned.status in tried else None)]
        if pinned.value:
            found += [("pinned", pinned.value.refusal), ("pinned", pinned.value.malloc_refusal)]
        found.append(("run", self.last_run.refusal))
        return tuple(dict.fromkeys((group, error) for group, error in found if error))

    def met(self, *codes: int) -> tuple[Evidence, ...]:
        """Return as evidence every CUDA error met that has one of `codes`."""
        return tuple(self.says(g, error_text(e)) for g, e in self.cuda_errors if e.code in codes)

    def pip_install(self, *options: str) -> str:
        """Return the command that installs CuPy and the CUDA libraries of a version that driver and GPU support."""
        return remedy_for(
            version(self.nvml.cuda_driver_version), self.capability(), *options, windows=self.host.os == "windows"
        )

    def capability(self) -> tuple[int, ...] | None:
        """Return the compute capability of the GPU that --gpu names, else of the newest; None when not known."""
        chosen = [g for g in self.nvml.gpus if self.options.gpu and self.options.gpu in (str(g.index), g.uuid)]
        known = [v for gpu in chosen or self.nvml.gpus if (v := version(gpu.compute_capability)) and len(v) == 2]
        return max(known, default=None)

    def says(self, path: str, text: str) -> Evidence:
        """Return `text` as evidence, with the source of the fact at `path` (``"host.ram_total_bytes"``)."""
        return Evidence(text=text, source=self.source(path))

    def source(self, path: str) -> str:
        """Return where the fact at `path` was, or would have been, read."""
        group, *fields = path.split(".")
        value = self.facts_of(group).value if group in GROUPS else None
        own: dict[str, str] = getattr(value, "sources", {})
        return own.get(fields[-1] if fields else "") or WHERE.get(group, group)

    def facts_of(self, group: str) -> Probe[Any]:
        """Return the probe outcome called `group`."""
        probe: Probe[Any] = getattr(self.facts, group)
        return probe

    def reason(self, group: str) -> str:
        """Return how the probe called `group` ended, with the error it gave."""
        probe = self.facts_of(group)
        if group == "disk" and probe.status is ProbeStatus.SKIPPED and self.model:
            return "these facts are without the model's disk"
        if probe.status is ProbeStatus.SKIPPED and probe.error:
            return probe.error.message
        why = f": {probe.error.message}" if probe.error else ""
        how = {"timed_out": "timed out", "unsupported": "found nothing", "skipped": "was not run"}
        return f"the {group} probe {how.get(probe.status, probe.status)}{why}"

    def per_os(self, *, linux: str, windows: str, wsl: str | None = None) -> str:
        """Return the wording for the system this machine runs; Linux's where that is not known."""
        if self.host.os == "windows":
            return windows
        return wsl if wsl and self.host.wsl == "wsl2" else linux

    def nvidia_smi(self, arguments: str) -> str:
        """Return the command that changes a GPU's settings, which takes an administrator; WSL2 cannot change them."""
        return self.per_os(
            linux=f"sudo nvidia-smi {arguments}",
            windows=f"nvidia-smi {arguments}, in a terminal opened as administrator",
            wsl=f"in Windows, in a terminal opened as administrator: nvidia-smi {arguments}",
        )

    def missing(self, path: str) -> Missing | None:
        """Return why the fact at `path` is not known, or None when it is.

        A path through a tuple (``"nvml.gpus.display_active"``) is known when it is known of every element.
        """
        group, *fields = path.split(".")
        if group in ("model", "plan"):
            return None if getattr(self, group) else Missing(path, self._why_not_given(group), not_asked=True)
        probe = self.facts_of(group)
        owner = getattr(self, "last_run" if group == "run" else group)
        if probe.value is None or owner is None:
            gap: Missing | None = Missing(path, self.reason(group))
        else:
            gap = _find_missing(
                path, owner, fields, NOT_REPORTED if probe.status is ProbeStatus.OK else self.reason(group)
            )
        if gap and probe.status in (ProbeStatus.UNSUPPORTED, ProbeStatus.SKIPPED):
            unsupported = probe.status is ProbeStatus.UNSUPPORTED
            return replace(gap, not_here=unsupported, not_asked=not unsupported)
        return gap

    def _why_not_given(self, what: str) -> str:
        return "no plan was made" if what == "plan" and self.model else "no model was given"


def error_text(error: ProbeError) -> str:
    """Return a failed call in one line: what was called, the code, its name and its string."""
    code = " ".join(str(part) for part in (error.code, error.name) if part is not None)
    return f"{error.call or 'a call'} failed: {error.message}" + (f" ({code})" if code else "")


def _find_missing(path: str, owner: Any, fields: list[str], why: str) -> Missing | None:
    name, *rest = fields
    value = getattr(owner, name)
    reason = getattr(owner, "unknown", {}).get(name)
    if reason == NO_LIMIT:
        return None
    if value is None or (value in ((), {}) and (reason or why != NOT_REPORTED)):  # a broken-off probe had not got there
        return Missing(path, reason or why, not_here=bool(NOT_HERE.search(reason or "")))
    elements = value if isinstance(value, tuple) else (value,)
    gaps = (_find_missing(path, element, rest, why) for element in elements) if rest else ()
    return next((gap for gap in gaps if gap), None)


def _believable(struct: S) -> S:
    """Return `struct` with every impossible number replaced by None; error codes are left as they came."""
    changes: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)):
            changes[name] = None
        elif isinstance(value, tuple):
            changes[name] = tuple(_believable(v) if isinstance(v, msgspec.Struct) else v for v in value)
        elif isinstance(value, msgspec.Struct) and not isinstance(value, ProbeError):
            changes[name] = _believable(value)
    return msgspec.structs.replace(struct, **changes) if changes else struct
