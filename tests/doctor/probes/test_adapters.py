from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.facts import AdapterFacts
from strata.doctor.probes.adapters import pci_adapters
from tests.doctor.probes.machine_tree import lay


def pci(bus: str, vendor: str, device: str, kind: str = "0x030000", **more: str) -> dict[str, str]:
    files = {"class": kind, "vendor": vendor, "device": device, **more}
    return {f"sys/bus/pci/devices/{bus}/{name}": text + "\n" for name, text in files.items()}


def test_desktop_on_the_integrated_adapter(tmp_path: Path) -> None:
    screens = {"drm/card1/card1-HDMI-A-1/status": "connected", "drm/card1/card1-DP-1/status": "disconnected"}
    dark = {"drm/card0/card0-DP-2/status": "disconnected"}
    root = lay(
        tmp_path,
        pci("0000:00:02.0", "0x8086", "0x4680", boot_vga="1", **screens)
        | pci("0000:01:00.0", "0x10de", "0x2d04", boot_vga="0", **dark)
        | pci("0000:00:1f.3", "0x8086", "0x7ad0", kind="0x040300"),
    )
    (root / "sys/drivers/i915").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:00:02.0/driver").symlink_to(root / "sys/drivers/i915")
    intel, nvidia = pci_adapters(root).adapters
    assert (intel.vendor, intel.pci_id, intel.driver, intel.integrated) == ("Intel", "8086:4680", "i915", True)
    assert (intel.boot_display, intel.displays) == (True, 1)
    assert (nvidia.vendor, nvidia.integrated, nvidia.displays, nvidia.driver) == ("NVIDIA", False, 0, None)
    assert "driver" in nvidia.unknown


def test_amd_tells_its_memory_and_not_whether_it_is_integrated(tmp_path: Path) -> None:
    memory = {"mem_info_vram_total": "536870912", "mem_info_vram_used": "1048576", "product_name": "Radeon 780M"}
    root = lay(tmp_path, pci("0000:c4:00.0", "0x1002", "0x15bf", **memory))
    (amd,) = pci_adapters(root).adapters
    assert (amd.vendor, amd.name, amd.vram_total_bytes, amd.vram_used_bytes) == ("AMD", "Radeon 780M", 1 << 29, 1 << 20)
    assert amd.integrated is None
    assert amd.unknown["displays"] == "no display driver is bound to it"


def test_unknown_maker_keeps_its_number(tmp_path: Path) -> None:
    (adapter,) = pci_adapters(lay(tmp_path, pci("0000:03:00.0", "0xabcd", "0x0001", kind="0x038000"))).adapters
    assert (adapter.vendor, adapter.pci_id) == ("abcd", "abcd:0001")


@pytest.mark.parametrize(
    ("files", "reason"),
    [({}, "no PCI bus"), ({"sys/bus/pci/devices/": "", "dev/dxg": ""}, "only /dev/dxg")],
)
def test_none_seen_is_unknown_where_there_may_be_some(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    assert reason in pci_adapters(lay(tmp_path, files)).unknown["adapters"]


def test_none_at_all_is_an_answer(tmp_path: Path) -> None:
    facts = pci_adapters(lay(tmp_path, pci("0000:00:03.0", "0x1af4", "0x1041", kind="0x020000")))
    assert facts == AdapterFacts(sources={"adapters": "/sys/bus/pci/devices"})
