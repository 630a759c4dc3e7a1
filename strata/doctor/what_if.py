"""Facts of a machine that one does not have: a card of the table, some RAM, a system; and what was assumed."""

from __future__ import annotations

from strata import __version__
from strata.doctor.budgets import NO_LIMIT
from strata.doctor.cards import Card
from strata.doctor.facts import (
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
)
from strata.doctor.units import GIB, MIB, size

_NOT_TRIED = ProbeError(message="this machine is imagined")
_DRIVER_KEEPS = 400 * MIB  # of VRAM, with nothing running
_DESKTOP_TAKES = 1024 * MIB
_SYSTEM_TAKES = {"linux": 2 * GIB, "wsl2": 1 * GIB, "windows": 4 * GIB}
_WSL2_GRANTS = 512 * MIB  # of page-locked memory: the least that reports tell of


def what_if_facts(card: Card, ram_bytes: int, *, system: str = "linux") -> tuple[Facts, tuple[str, ...]]:
    """Imagine a machine.

    Parameters
    ----------
    card : Card
        Its one GPU.
    ram_bytes : int
        Its RAM; under WSL2 that of the Windows machine.
    system : str
        "linux", "windows" or "wsl2".

    Returns
    -------
    facts : Facts
    assumed : tuple of str
        Every fact that was assumed, as sentences.
    """
    ram = ram_bytes // 2 if system == "wsl2" else ram_bytes
    available = max(ram - _SYSTEM_TAKES[system], 0)
    desktop = system != "linux"
    vram_free = card.vram_bytes - _DRIVER_KEEPS - (_DESKTOP_TAKES if desktop else 0)
    assumed = [
        f"A machine with one {card.name} ({size(card.vram_bytes)} of VRAM, {card.bandwidth / 1e9:,.0f} GB/s, "
        f"{card.link_name}) and {size(ram_bytes)} of RAM is assumed; nothing of it was measured.",
        f"{size(vram_free)} of VRAM are taken to be free: the driver keeps {size(_DRIVER_KEEPS)}"
        + (f" and the desktop has {size(_DESKTOP_TAKES)}." if desktop else ", and no desktop is drawn on the card."),
        f"{size(available)} of RAM are taken to be available"
        + (", WSL2 having half of the machine's, its default." if system == "wsl2" else "."),
    ]
    pinned: Probe[PinnedFacts] = Probe(status=ProbeStatus.SKIPPED, error=_NOT_TRIED)
    if system == "linux":
        granted = PinnedFacts(asked_bytes=available, granted_bytes=available)
        pinned = Probe(status=ProbeStatus.OK, value=granted)
        assumed.append("Linux is taken to page-lock whatever RAM is available.")
    elif system == "wsl2":
        refused = PinnedFacts(asked_bytes=GIB, granted_bytes=_WSL2_GRANTS, refusal=_NOT_TRIED)
        pinned = Probe(status=ProbeStatus.OK, value=refused)
        assumed.append(f"WSL2 is taken to page-lock {size(_WSL2_GRANTS)}, as on most machines; on some it is far more.")
    else:
        assumed.append("Nothing is taken to be page-locked: what Windows grants differs too much to assume.")
    host = HostFacts(
        os="windows" if system == "windows" else "linux",
        wsl="wsl2" if system == "wsl2" else "none",
        ram_total_bytes=ram,
        ram_available_bytes=available,
        unknown={"cgroup_limit_bytes": NO_LIMIT, "address_space_limit_bytes": NO_LIMIT},
    )
    gpu = NvmlGpu(
        index=0,
        name=card.name,
        uuid="GPU-imagined",
        vram_total_bytes=card.vram_bytes,
        vram_free_bytes=vram_free,
        display_active=desktop,
        driver_model="WDDM" if system == "windows" else None,
    )
    facts = Facts(
        strata_version=__version__,
        host=Probe(status=ProbeStatus.OK, value=host),
        nvml=Probe(status=ProbeStatus.OK, value=NvmlFacts(gpus=(gpu,))),
        cuda=Probe[CudaFacts](status=ProbeStatus.SKIPPED, error=_NOT_TRIED),
        pinned=pinned,
        disk=Probe[DiskFacts](status=ProbeStatus.SKIPPED, error=_NOT_TRIED),
    )
    return facts, tuple(assumed)
