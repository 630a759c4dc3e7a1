"""Facts of machines with a GPU, from the numbers that bug reports and data sheets give."""

from __future__ import annotations

from strata.doctor.facts import (
    CudaDevice,
    CudaFacts,
    Facts,
    HostFacts,
    NvmlFacts,
    NvmlGpu,
    PinnedFacts,
    Probe,
    ProbeError,
    ProbeStatus,
)
from tests.doctor.shapes import GIB, MIB

REFUSED = ProbeError(message="out of memory", code=2, name="cudaErrorMemoryAllocation", call="cudaHostAlloc(64 MiB)")
PINNED_45_GIB = PinnedFacts(asked_bytes=48 * GIB, granted_bytes=45 * GIB, ballast_bytes=0, refusal=REFUSED)


def gpu_machine(
    *,
    vram_total: int,
    vram_free: int,
    ram: int,
    name: str = "NVIDIA GeForce RTX 4090",
    display: bool | None = False,
    pinned: PinnedFacts | None = None,
    cuda: CudaDevice | None = None,
    **host: object,
) -> Facts:
    """Return a machine with one GPU and `ram` bytes available; `pinned` None: not measured."""
    seen = NvmlGpu(
        index=0,
        name=name,
        uuid="GPU-0",
        vram_total_bytes=vram_total,
        vram_free_bytes=vram_free,
        display_active=display,
    )
    facts = {
        "os": "linux",
        "wsl": "none",
        "cpu_physical": 8,
        "ram_available_bytes": ram,
        "ram_total_bytes": ram,
        **host,
    }
    return Facts(
        host=Probe(
            status=ProbeStatus.OK,
            value=HostFacts(**facts, unknown={"cgroup_limit_bytes": "no limit"}),  # type: ignore[arg-type]
        ),
        nvml=Probe(status=ProbeStatus.OK, value=NvmlFacts(gpus=(seen,))),
        cuda=Probe(status=ProbeStatus.OK, value=CudaFacts(devices=(cuda,)))
        if cuda
        else Probe(status=ProbeStatus.SKIPPED),
        pinned=Probe(status=ProbeStatus.OK, value=pinned) if pinned else Probe(status=ProbeStatus.SKIPPED),
        disk=Probe(status=ProbeStatus.SKIPPED),
    )


def rtx_5060_ti_on_windows(*, monitor_on_card: bool, pinned: PinnedFacts | None = None) -> Facts:
    """A 16 GB card beside an integrated GPU, 64 GB of RAM, Windows 11; the report is of both places for the monitor."""
    total = 16_311 * MIB
    used = 1024 * MIB if monitor_on_card else 0
    return gpu_machine(
        name="NVIDIA GeForce RTX 5060 Ti",
        vram_total=total,
        vram_free=total - 200 * MIB - used,
        display=monitor_on_card,
        pinned=pinned,
        cuda=CudaDevice(ordinal=0, uuid="GPU-0", vram_free_bytes=total - 600 * MIB - used, context_bytes=400 * MIB),
        ram=56 * GIB,
        ram_total_bytes=64 * GIB,
        os="windows",
        commit_limit_bytes=96 * GIB,
        commit_used_bytes=10 * GIB,
        wsl=None,
    )


def rtx_4090_on_wsl2(*, pinned: PinnedFacts | None) -> Facts:
    """A 24 GB card, 56 GB of RAM given to WSL2, where little can be page-locked."""
    return gpu_machine(
        vram_total=24_564 * MIB,
        vram_free=23_000 * MIB,
        display=True,
        pinned=pinned,
        ram=54 * GIB,
        ram_total_bytes=56 * GIB,
        wsl="wsl2",
    )
