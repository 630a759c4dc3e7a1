"""Whether a process gets a CUDA context at all, and which GPUs it is shown."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, unknown
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.checks.pinned import COUNTS, malloc_works
from strata.doctor.checks.wsl import foreign_libcuda
from strata.doctor.facts import ProbeStatus
from strata.doctor.units import counted


def visible_devices(m: Machine) -> str | None:
    """Return CUDA_VISIBLE_DEVICES; None when it is not set."""
    value = m.cuda.visible_devices
    return m.cuda.environment.get("CUDA_VISIBLE_DEVICES") if value is None else value


def hides_every_gpu(m: Machine) -> bool | None:
    """Say whether CUDA_VISIBLE_DEVICES leaves no GPU; None where the UUIDs that would tell are not known.

    CUDA takes the list up to the first entry that names nothing: a number beyond the GPUs, or an unknown UUID.
    """
    value = visible_devices(m)
    if value is None:
        return False
    first = value.split(",")[0].strip()
    if first.isdecimal():
        return int(first) >= len(m.nvml.gpus)
    if first.upper().startswith("MIG-") and any(gpu.mig for gpu in m.nvml.gpus):
        return None  # the driver's list has no slices
    if not first.upper().startswith("GPU-"):
        return True
    uuids = [gpu.uuid for gpu in m.nvml.gpus]
    named = any(uuid and uuid.lower().startswith(first.lower()) for uuid in uuids)
    return False if named else None if None in uuids else True


@check("STR-CTX-BROKEN", "Usable CUDA context", needs=("cuda.devices", *COUNTS), essential=True)
def broken_context(m: Machine) -> Result | None:
    """The first CUDA call of a process fails, whatever it is: a 322 MiB page-locked request with "no CUDA-capable
    device", then cudaMalloc too, while nvidia-smi and other programs see the GPU. That is not a pinning limit: this
    environment cannot make a context, because the CUDA runtime or toolkit it uses does not match the driver."""
    both_refused = bool(m.pinned and not m.pinned.granted_bytes and m.pinned.refusal and malloc_works(m) is False)
    no_device = any(group == "cuda" and error.code == 100 for group, error in m.cuda_errors)
    explained = hides_every_gpu(m) is not False or foreign_libcuda(m)
    if not both_refused and not (no_device and not explained):
        return passed("A context can be made: device memory and page-locked memory are both granted.")
    if not m.nvml.gpus:  # then nothing says that there is a GPU to be had
        asked = m.missing("nvml.gpus") is None
        return None if asked else unknown("CUDA finds no usable GPU, and the driver could not be asked.")
    seen = f"the driver sees {counted(len(m.nvml.gpus), 'GPU')}"
    evidence = [
        m.says(
            "nvml.driver_version",
            f"driver {m.nvml.driver_version or '?'}, up to CUDA {m.nvml.cuda_driver_version or '?'}",
        ),
        m.says(
            "cuda.runtime_version", f"CUDA runtime {m.cuda.runtime_version or '?'}, NVRTC {m.cuda.nvrtc_version or '?'}"
        ),
        *(m.says(group, error_text(error)) for group, error in m.cuda_errors),
        *(m.says("cuda.libcuda_candidates", f"libcuda: {file.path}") for file in m.cuda.libcuda_candidates[:2]),
        m.says("cuda.devices", f"{counted(len(m.cuda.devices), 'CUDA device')} here; {seen}"),
    ]
    if m.pinned and m.pinned.fresh_process_ok:
        evidence.append(m.says("pinned.fresh_process_ok", "the same request succeeds in a fresh process"))
    if both_refused and not no_device and m.pinned and m.pinned.fresh_process_ok and m.cuda.kernel_ok:
        return fail(
            "One process lost its use of CUDA between two calls; in a fresh process the same calls succeed.",
            *evidence,
            m.says("cuda.kernel_ok", "a kernel runs in another process"),
            remedy="Start anew: driver, runtime and GPU work together. If it comes back, start "
            + m.per_os(linux="the container or the machine", windows="Windows", wsl="WSL (in Windows: wsl --shutdown)")
            + " anew, and send us: strata report",
        )
    return fail(
        f"CUDA runtime {m.cuda.runtime_version or '?'} cannot use the GPU on driver {m.nvml.driver_version or '?'} "
        f"(CUDA {m.nvml.cuda_driver_version or '?'}), although {seen}.",
        *evidence,
        remedy=f"In a fresh environment: {m.pip_install()} "
        "(an own build: rebuild with the toolkit of the driver's CUDA version)",
    )


@check("STR-CUDA-HIDDEN", "CUDA_VISIBLE_DEVICES", needs=("cuda.devices", "nvml.gpus"))
def hidden(m: Machine) -> Result | None:
    """CUDA_VISIBLE_DEVICES decides which GPUs a program sees. Empty, -1, a wrong number or an old UUID hides them all:
    "no CUDA-capable device is detected" (100) or "invalid device ordinal" (101)."""
    value = visible_devices(m)
    if not m.nvml.gpus:
        return None
    hides = hides_every_gpu(m)
    if value is None or m.cuda.devices or hides is False:
        return passed("CUDA_VISIBLE_DEVICES hides no GPU that is needed.")
    if hides is None:
        return unknown(f'CUDA_VISIBLE_DEVICES is set to "{value}"; whether that names a GPU here is not known.')
    if m.facts.cuda.status is ProbeStatus.OK or m.met(100, 101):
        return fail(
            f'CUDA_VISIBLE_DEVICES is set to "{value}", which hides every GPU.',
            m.says("cuda.visible_devices", f'CUDA_VISIBLE_DEVICES="{value}"'),
            m.says("nvml.gpus", f"the driver sees {', '.join(m.gpus)}"),
            *m.met(100, 101),
            remedy=m.per_os(linux="unset CUDA_VISIBLE_DEVICES", windows="set CUDA_VISIBLE_DEVICES="),
        )
    return passed("CUDA_VISIBLE_DEVICES is not what failed.")
