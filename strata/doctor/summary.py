"""The machine in a few lines, for the head of every form of a report."""

from __future__ import annotations

from strata.doctor.facts import Facts, HostFacts, NvmlGpu, ProbeStatus
from strata.doctor.units import size, speed


def summary(facts: Facts) -> list[tuple[str, str]]:
    """Return (label, text) lines that say what machine this is. What is not known is left out, or said to be so."""
    lines = [("Strata", facts.strata_version or "version unknown")]
    if host := facts.host.value:
        lines += [("System", _system(host)), ("CPU", _cpu(host)), ("RAM", _ram(host))]
    else:
        lines.append(("System", _outcome(facts, "host")))
    lines += _gpus(facts)
    lines += _slices(facts)
    lines.append(("CUDA", _cuda(facts)))
    if (pinned := facts.pinned.value) and facts.pinned.status is ProbeStatus.OK:
        refused = ", then refused" if pinned.refusal else ""
        lines.append(("Pinned", f"{size(pinned.granted_bytes)} of {size(pinned.asked_bytes)} granted{refused}"))
    if (disk := facts.disk.value) and disk.path:
        rate = f", read at {speed(disk.read_bytes_per_s)}" if disk.read_bytes_per_s else ""
        cached = " from the page cache" if rate and disk.read_was_cached else ""
        lines.append(("Model", f"{disk.path} ({disk.filesystem or 'file system unknown'}{rate}{cached})"))
    if (moved := facts.speed.value) and moved.h2d_pinned_bytes_per_s and not _shares_ram(facts):
        lines.append(("Link", f"{speed(moved.h2d_pinned_bytes_per_s)} to the GPU from page-locked memory"))
    return lines


def _shares_ram(facts: Facts) -> bool:
    """Say whether the GPU whose copies were measured is integrated: copying to it is no copy."""
    measured = facts.speed.value and facts.speed.value.device_uuid
    devices = facts.cuda.value.devices if facts.cuda.value else ()
    return any(device.integrated and measured in (None, device.uuid) for device in devices)


def _slices(facts: Facts) -> list[tuple[str, str]]:
    """Return what CUDA says of the slices of a divided card that it shows: what a process really gets."""
    devices = facts.cuda.value.devices if facts.cuda.value else ()
    if not facts.nvml.value or not any(gpu.mig for gpu in facts.nvml.value.gpus):
        return []
    totals = [(d.ordinal, d.vram_total_bytes) for d in devices if d.vram_total_bytes is not None]
    return [(f"CUDA {ordinal}", f"{size(total)}, as CUDA sees its MIG slice") for ordinal, total in totals]


def _outcome(facts: Facts, group: str) -> str:
    probe = getattr(facts, group)
    unknown = "none" if probe.status is ProbeStatus.UNSUPPORTED else "not known"
    return f"{unknown} ({probe.error.message if probe.error else probe.status})"


def _system(host: HostFacts) -> str:
    parts = [host.os_release or host.os or "system unknown"]
    if host.kernel and host.kernel not in parts[0]:
        parts.append(f"kernel {host.kernel}")
    if host.wsl not in (None, "none"):
        parts.append(host.wsl.upper())
    if host.container not in (None, "none"):
        parts.append(f"in {host.container}")
    return ", ".join(parts)


def _cpu(host: HostFacts) -> str:
    cores = f", {host.cpu_logical} threads" if host.cpu_logical else ""
    kinds = f" ({host.cpu_performance} fast, {host.cpu_efficiency} efficient)" if host.cpu_efficiency else ""
    return f"{host.cpu_model or 'model unknown'}{cores}{kinds}"


def _ram(host: HostFacts) -> str:
    parts = [size(host.ram_total_bytes) if host.ram_total_bytes is not None else "size unknown"]
    if host.ram_available_bytes is not None:
        parts.append(f"{size(host.ram_available_bytes)} available")
    if host.cgroup_limit_bytes is not None:
        parts.append(f"limit {size(host.cgroup_limit_bytes)}")
    if host.swap_total_bytes:
        parts.append(f"{size(host.swap_total_bytes)} {'page file' if host.os == 'windows' else 'swap'}")
    return ", ".join(parts)


def _gpus(facts: Facts) -> list[tuple[str, str]]:
    nvml = facts.nvml.value
    if nvml is None:
        return [("GPU", _outcome(facts, "nvml"))]
    driver = f"{nvml.driver_version or 'version unknown'}, up to CUDA {nvml.cuda_driver_version or 'unknown'}"
    return [(f"GPU {gpu.index}", _gpu(gpu)) for gpu in nvml.gpus] + [("Driver", driver)]


def _gpu(gpu: NvmlGpu) -> str:
    parts = [gpu.name or "name unknown"]
    if gpu.vram_total_bytes is not None:
        parts.append(size(gpu.vram_total_bytes))
    if gpu.vram_free_bytes is not None:
        parts.append(f"{size(gpu.vram_free_bytes)} free")
    if gpu.compute_capability:
        parts.append(f"sm_{gpu.compute_capability.replace('.', '')}")
    if gpu.mig:
        parts.append("the whole card, divided into MIG slices")
    if gpu.driver_model:
        parts.append(gpu.driver_model)
    if gpu.display_active:
        parts.append("draws the desktop")
    return ", ".join(parts)


def _cuda(facts: Facts) -> str:
    cuda = facts.cuda.value
    if cuda is None:
        return _outcome(facts, "cuda")
    packages = ", ".join(f"{name} {version}" for name, version in cuda.cupy_packages.items()) or "no CuPy"
    versions = f"runtime {cuda.runtime_version or 'unknown'}, NVRTC {cuda.nvrtc_version or 'unknown'}"
    failed = "" if facts.cuda.status is ProbeStatus.OK else f"; {_outcome(facts, 'cuda')}"
    if not cuda.cupy_packages and facts.cuda.status is ProbeStatus.UNSUPPORTED:
        return packages
    return f"{packages}; {versions}{failed}" if cuda.cupy_packages else f"{packages}{failed}"
