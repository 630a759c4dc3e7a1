"""Which GPUs there are, and whether everyone means the same one."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, warn
from strata.doctor.checks.driver import cupy_major
from strata.doctor.checks.machine import Machine
from strata.doctor.cuda_packages import OLDEST_GPU, remedy_for
from strata.doctor.facts import ProbeStatus
from strata.doctor.units import GIB, counted, size, version


@check("STR-GPU-COUNT", "Driver and CUDA agree on the GPUs", needs=("cuda.devices.uuid", "nvml.gpus.uuid"))
def disagree(m: Machine) -> Result | None:
    """The driver's management library and CUDA are matched by UUID. A GPU that only one of them knows cannot be
    planned for: its free memory or its display is not known."""
    if m.facts.cuda.status is not ProbeStatus.OK or m.facts.nvml.status is not ProbeStatus.OK:
        return None
    if m.cuda.visible_devices is not None or any(gpu.mig for gpu in m.nvml.gpus):
        return None
    seen, known = {d.uuid for d in m.cuda.devices}, {g.uuid for g in m.nvml.gpus}
    if None in seen | known or seen == known:
        return passed("The driver and CUDA see the same GPUs.")
    return warn(
        f"The driver knows {counted(len(known), 'GPU')} and CUDA {len(seen)}, and they are not the same.",
        *(m.says("nvml.gpus", f"NVML: {name}, {gpu.uuid}") for name, gpu in m.gpus.items()),
        *(
            m.says("cuda.devices", f"CUDA: device {d.ordinal} ({d.name or 'name unknown'}), {d.uuid}")
            for d in m.cuda.devices
        ),
        remedy="Name the GPU to use by its UUID: --gpu UUID; a GPU that CUDA leaves out may be too old for this CUDA",
    )


@check("STR-GPU-ORDER", "Order of the GPUs", needs=("cuda.devices.nvml_index",))
def order(m: Machine) -> Result | None:
    """CUDA counts the fastest GPU first, nvidia-smi by bus. With several GPUs, number 0 of one is not number 0 of the
    other, and the wrong card is used."""
    if len(m.nvml.gpus) < 2 or len(m.cuda.devices) < 2 or m.options.gpu is not None:
        return None
    moved = [d for d in m.cuda.devices if d.nvml_index is not None and d.nvml_index != d.ordinal]
    if not moved:
        return passed("CUDA and nvidia-smi number the GPUs alike.")
    return warn(
        "CUDA numbers the GPUs in another order than nvidia-smi.",
        *(m.says("cuda.devices", f"{d.name}: CUDA {d.ordinal}, nvidia-smi {d.nvml_index}") for d in m.cuda.devices),
        remedy="Name the GPU by UUID: --gpu UUID; or: "
        + m.per_os(linux="export CUDA_DEVICE_ORDER=PCI_BUS_ID", windows="set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    )


@check("STR-GPU-MIG", "GPU in parts", needs=("nvml.gpus.mig",))
def mig(m: Machine) -> Result | None:
    """With MIG on, a process gets one slice of the GPU: less memory than nvidia-smi's total says."""
    sliced = [name for name, gpu in m.gpus.items() if gpu.mig]
    if not sliced:
        return passed("No GPU is divided.")
    return warn(
        f"{', '.join(sliced)} is divided into MIG instances; a process gets one of them.",
        m.says("nvml.gpus.mig", "MIG mode: enabled"),
        *(
            m.says("cuda.devices", f"CUDA device {d.ordinal}: {size(d.vram_total_bytes)}, {d.uuid or 'no UUID'}")
            for d in m.cuda.devices
            if d.vram_total_bytes is not None
        ),
        remedy=m.per_os(linux="export", windows="set")
        + " CUDA_VISIBLE_DEVICES=MIG-UUID (nvidia-smi -L lists them), or "
        + m.nvidia_smi("-mig 0"),
    )


@check(
    "STR-GPU-OLD", "GPU new enough for the CuPy installed", needs=("nvml.gpus.compute_capability", "cuda.cupy_packages")
)
def old_gpu(m: Machine) -> Result | None:
    """CUDA 13 dropped the GPUs before Turing (compute capability below 7.5); CUDA 12 still runs them."""
    if cupy_major(m) != 13:
        return passed("CuPy's CUDA supports every GPU here.") if m.cuda.cupy_packages else None
    old = {
        n: g.compute_capability for n, g in m.gpus.items() if (version(g.compute_capability) or (99,)) < OLDEST_GPU[13]
    }
    if not old:
        return passed("CuPy's CUDA supports every GPU here.")
    others = [d for d in m.cuda.devices if d.error is None and (version(d.compute_capability) or (0,)) >= (7, 5)]
    verdict = warn if others and m.cuda.kernel_ok else fail  # another GPU works
    return verdict(
        f"CUDA 13 no longer supports {', '.join(old)}.",
        *(m.says("nvml.gpus", f"{name}: compute capability {cc}, CUDA 13 needs 7.5") for name, cc in old.items()),
        remedy="pip uninstall -y cupy-cuda13x, then: "
        + remedy_for(
            version(m.nvml.cuda_driver_version), min(filter(None, map(version, old.values())), default=(7, 0))
        ),
    )


@check("STR-GPU-INTEGRATED", "GPU with its own memory", needs=("cuda.devices.integrated",))
def integrated(m: Machine) -> Result | None:
    """An integrated GPU's memory is RAM. Copying to it is no copy (8,666 GB/s has been "measured"), and what is
    planned twice is there once."""
    shared = [d for d in m.cuda.devices if d.integrated]
    if not m.cuda.devices:
        return None
    if not shared:
        return passed("The GPU has its own memory.")
    return warn(
        f"{shared[0].name or 'The GPU'} is integrated: its memory is the machine's RAM.",
        m.says("cuda.devices.integrated", "CUDA attribute integrated = 1"),
        remedy=f"Leave room for the system: --vram-budget {(m.host.ram_total_bytes or 8 * GIB) // 2 // GIB}GiB",
    )
