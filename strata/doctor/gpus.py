"""The GPU a plan is for: the driver's and CUDA's view of it, matched by UUID."""

from __future__ import annotations

from dataclasses import dataclass

from strata.doctor.facts import CudaDevice, CudaFacts, Facts, NvmlFacts, NvmlGpu, Probe
from strata.errors import Undetermined, UsageError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU. Either view may be missing, not both."""

    nvml: NvmlGpu | None
    cuda: CudaDevice | None

    @property
    def uuid(self) -> str:
        """Its UUID, or its place in the order when no UUID could be read."""
        known = (self.nvml and self.nvml.uuid) or (self.cuda and self.cuda.uuid)
        return known or f"gpu-{self.index}"

    @property
    def name(self) -> str:
        """Its name for people."""
        return (self.nvml and self.nvml.name) or (self.cuda and self.cuda.name) or "NVIDIA GPU"

    @property
    def index(self) -> int:
        """Its place in the order of nvidia-smi, which is the one people see; else CUDA's."""
        if self.nvml:
            return self.nvml.index
        return self.cuda.ordinal if self.cuda else 0


def gpus(facts: Facts) -> tuple[Gpu, ...]:
    """Return every GPU: CUDA's first, in its order, then those that only the driver lists."""
    listed = facts.nvml.value.gpus if facts.nvml.value else ()
    visible = facts.cuda.value.devices if facts.cuda.value else ()
    by_uuid = {gpu.uuid: gpu for gpu in listed if gpu.uuid}
    both = [Gpu(by_uuid.get(device.uuid or ""), device) for device in visible]
    seen = {gpu.nvml.index for gpu in both if gpu.nvml}
    return (*both, *(Gpu(gpu, None) for gpu in listed if gpu.index not in seen))


def choose_gpu(facts: Facts, wanted: str | None) -> Gpu:
    """Return the GPU that `--gpu` names, by index or UUID, or the first.

    Raises
    ------
    UsageError
        No GPU of this machine has that index or UUID.
    Undetermined
        The machine has no GPU that could be read.
    """
    found = gpus(facts)
    if not found:
        why = "; ".join(f"{name}: {_outcome(probe)}" for name, probe in (("driver", facts.nvml), ("CUDA", facts.cuda)))
        raise Undetermined(
            "plan for an NVIDIA GPU",
            f"none could be read ({why})",
            "Use --device cpu; what stands in the way is shown by: strata doctor",
        )
    if wanted is None:
        return found[0]
    for gpu in found:
        if wanted == str(gpu.index) or wanted.lower() == gpu.uuid.lower():
            return gpu
    there = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in found)
    raise UsageError(f"plan for GPU {wanted} (--gpu)", f"this machine has {there}", f"Use --gpu {found[0].index}")


def _outcome(probe: Probe[NvmlFacts] | Probe[CudaFacts]) -> str:
    return probe.error.message if probe.error else str(probe.status)
