"""All display controllers of the machine, of any maker: whether the desktop runs on another one is a fact."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from strata.doctor.facts import AdapterFacts, DisplayAdapter
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.pci_vendors import VENDORS
from strata.doctor.probes.request import ProbeRequest

_DISPLAY_CLASS = "0x03"  # VGA, XGA, 3D and other display controllers
_INTEL_INTEGRATED = "0000:00:02.0"  # where Intel's integrated graphics has always been


def probe(request: ProbeRequest) -> Iterator[AdapterFacts]:
    """Yield the display controllers of this machine."""
    if sys.platform == "win32":
        from strata.doctor.probes import dxgi

        yield dxgi.adapter_facts(list(dxgi.adapters()))
    elif sys.platform == "linux":
        yield pci_adapters(Path("/"))
    else:
        yield AdapterFacts(unknown={"adapters": f"not read on {sys.platform}"})


def pci_adapters(root: Path) -> AdapterFacts:
    """Return the display controllers on the PCI bus below `root`."""
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return AdapterFacts(unknown={"adapters": "this system shows no PCI bus"})
    found = tuple(
        _adapter(device)
        for device in sorted(devices.iterdir())
        if (device / "class").is_file() and (device / "class").read_text().startswith(_DISPLAY_CLASS)
    )
    if not found and (root / "dev/dxg").exists():
        return AdapterFacts(unknown={"adapters": "WSL shows no display controllers, only /dev/dxg"})
    return AdapterFacts(adapters=found, sources={"adapters": "/sys/bus/pci/devices"})


def _adapter(device: Path) -> DisplayAdapter:
    def number(name: str, base: int = 0) -> int:
        return int((device / name).read_text(), base)

    found = Collector()
    found.take("pci_id", lambda: f"{number('vendor'):04x}:{number('device'):04x}")
    found.take("vendor", lambda: VENDORS.get(number("vendor")) or f"{number('vendor'):04x}")
    found.take("name", lambda: (device / "product_name").read_text().strip())
    found.take("driver", lambda: (device / "driver").resolve(strict=True).name)
    found.take("boot_display", lambda: number("boot_vga") == 1)
    found.take("integrated", lambda: _integrated(found.values.get("vendor"), device.name))
    found.take("displays", lambda: _connected(device))
    found.take("vram_total_bytes", lambda: number("mem_info_vram_total"))  # amdgpu gives these two
    found.take("vram_used_bytes", lambda: number("mem_info_vram_used"))
    return DisplayAdapter(pci_bus_id=device.name, **found.values, unknown=found.unknown)


def _integrated(vendor: str | None, bus_id: str) -> bool:
    if vendor == "Intel":
        return bus_id == _INTEL_INTEGRATED
    if vendor == "NVIDIA":
        return False
    raise Unknown("the bus does not show it")


def _connected(device: Path) -> int:
    """Return how many of the controller's connectors have a monitor."""
    if not (device / "drm").is_dir():
        raise Unknown("no display driver is bound to it")
    return sum(status.read_text().strip() == "connected" for status in device.glob("drm/card*/card*-*/status"))
