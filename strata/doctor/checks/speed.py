"""Speed that is not what it should be."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, passed, warn
from strata.doctor.checks.machine import Machine
from strata.doctor.facts import NvmlGpu
from strata.doctor.units import counted, speed

LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}  # bytes/s a lane, coding taken off
MEASURED = ("speed.device_uuid", "nvml.gpus.uuid")  # which GPU the speeds are of
HEAT = ("sw_thermal_slowdown", "hw_thermal_slowdown")
POWER = ("hw_slowdown", "hw_power_brake_slowdown")


def measured_gpu(m: Machine) -> NvmlGpu | None:
    """Return the GPU that the speed probe ran on."""
    return next((g for g in m.nvml.gpus if g.uuid and g.uuid == m.speed.device_uuid), None)


def link_speed(generation: int | None, width: int | None) -> float | None:
    """Return what a PCIe link carries in one direction, in bytes per second; None when its kind is not known."""
    lane = LANE.get(generation or 0)
    return lane * width if lane and width else None


@check("STR-PCIE-WIDTH", "Link to the GPU", needs=("speed.pcie_width_loaded", "nvml.gpus.pcie_width_max", *MEASURED))
def width(m: Machine) -> Result | None:
    """A card in an x1 or x4 slot, or on a bad riser, prompts at a quarter of its speed (350 instead of 1,410 tokens per
    second). Judged by the link under load only: idle links slow down by themselves."""
    gpu = measured_gpu(m)
    now, most = m.speed.pcie_width_loaded, gpu.pcie_width_max if gpu else None
    slot_narrow = now is not None and now <= 4
    if now is None or not (slot_narrow or (most and now < most)):
        return passed("The link to the GPU has its full width under load.")
    return warn(
        f"The link to the GPU is {counted(now, 'lane')} wide while it copies" + (f", of {most}." if most else "."),
        m.says("speed.pcie_width_loaded", f"PCIe {m.speed.pcie_generation_loaded or '?'} x{now} under load"),
        *(
            [m.says("speed", f"copies at {speed(m.speed.h2d_pinned_bytes_per_s)}")]
            if m.speed.h2d_pinned_bytes_per_s
            else []
        ),
        remedy="Put the card into the slot next to the processor (x16), reseat it, take risers out; "
        "an M.2 drive may share its lanes (see the mainboard's manual)",
    )


@check(
    "STR-PCIE-GEN",
    "Generation of the link",
    needs=("speed.pcie_generation_loaded", "nvml.gpus.pcie_generation_max", *MEASURED),
)
def generation(m: Machine) -> Result | None:
    """Under load the link runs below the generation that card and slot can do together: a riser, or a BIOS setting."""
    gpu = measured_gpu(m)
    now, most = m.speed.pcie_generation_loaded, gpu.pcie_generation_max if gpu else None
    if now is None or most is None or now >= most:
        return passed("The link to the GPU runs at its full generation under load.")
    return warn(
        f"The link to the GPU runs at PCIe {now} under load; card and slot can do {most}.",
        m.says("speed.pcie_generation_loaded", f"PCIe {now} while copying"),
        m.says("nvml.gpus.pcie_generation_max", f"at most PCIe {most}"),
        remedy="BIOS: PCIe slot speed 'Auto' or 'Gen" + f"{most}'; take risers out",
    )


@check("STR-PCIE-COPY", "Copy speed to the GPU", needs=("speed.h2d_pinned_bytes_per_s", "speed.pcie_width_loaded"))
def copy(m: Machine) -> Result | None:
    """Copies from page-locked memory reach 80 to 90 % of the link. Well below that, the link has errors, a virtual
    machine is in between, or RAM is the bottleneck (one module only)."""
    rate = m.speed.h2d_pinned_bytes_per_s
    best = link_speed(m.speed.pcie_generation_loaded, m.speed.pcie_width_loaded)
    if rate is None or best is None or rate >= best / 2:
        return passed("Copies to the GPU run at the speed of the link.") if best else None
    return warn(
        f"Copies to the GPU reach {speed(rate)}, less than half of what the link carries ({speed(best)}).",
        m.says("speed.h2d_pinned_bytes_per_s", f"measured {speed(rate)} from page-locked memory"),
        m.says(
            "speed.pcie_width_loaded", f"PCIe {m.speed.pcie_generation_loaded} x{m.speed.pcie_width_loaded} under load"
        ),
        remedy="BIOS: XMP/EXPO on, modules in both channels; reseat the card"
        + m.per_os(linux="; iommu=pt on the kernel's command line", windows=""),
    )


@check("STR-GPU-HOT", "Heat", needs=("nvml.gpus.throttle_reasons",))
def hot(m: Machine) -> Result | None:
    """A hot GPU lowers its clocks: the longer a run, the slower."""
    slowed = {n: g for n, g in m.gpus.items() if set(g.throttle_reasons or ()) & set(HEAT)}
    if not slowed:
        return passed("No GPU is slowed down by heat.")
    return warn(
        f"{', '.join(slowed)} is slowed down by heat.",
        *(
            m.says(
                "nvml.gpus.throttle_reasons",
                f"{name}: {', '.join(g.throttle_reasons or ())}; {g.temperature_c or '?'} C",
            )
            for name, g in slowed.items()
        ),
        remedy="Clean the fans, give the case air, or lower the limit: " + m.nvidia_smi("-pl WATTS"),
    )


@check("STR-GPU-POWER", "Power", needs=("nvml.gpus.throttle_reasons", "nvml.gpus.power_limit_w"))
def power(m: Machine) -> Result | None:
    """A power brake (too small a supply, a missing connector) or a lowered limit keeps the clocks down."""
    slowed = []
    for name, gpu in m.gpus.items():
        braked = set(gpu.throttle_reasons or ()) & set(POWER)
        limit, usual = gpu.power_limit_w, gpu.power_limit_default_w
        if braked:
            slowed.append(f"{name}: {', '.join(sorted(braked))}")
        elif limit and usual and limit < 0.7 * usual:
            slowed.append(f"{name}: power limit {limit:.0f} W, by default {usual:.0f} W")
    if not slowed:
        return passed("No GPU is short of power.")
    return warn(
        "A GPU is held down by its power supply or limit.",
        *(m.says("nvml.gpus", text) for text in slowed),
        remedy="Check every power connector of the card; the limit is set so: " + m.nvidia_smi("-pl WATTS"),
    )
