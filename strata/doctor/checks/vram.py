"""Device memory: who else uses it, how much is really free, and what takes it away."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed, unknown, warn
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.facts import NvmlGpu
from strata.doctor.plan import Tier
from strata.doctor.units import MIB, size

TAKEN = 512 * MIB  # more than the driver itself and an idle desktop's remains
TAKEN_SHARE = 32  # and more than this part of the card: one idle context on a card of 140 GiB is no news
KEPT_SHARE = 32  # the driver keeps 0.4 to 2 % of a card for itself
TRUTHS_APART = 256 * MIB
LARGE_CONTEXT = 600 * MIB  # contexts with their modules have been 100 to 550 MiB
SPILL_RESERVE = 256 * MIB  # below this Windows pages VRAM out when the desktop wants some


COMMIT = ("host.commit_limit_bytes", "host.commit_used_bytes", "nvml.gpus.vram_free_bytes")
OTHERS = ("nvml.gpus.vram_used_bytes", "nvml.gpus.vram_reserved_bytes", "nvml.gpus.display_active")
FREE = (  # what it takes to compare free VRAM as CUDA and the driver see it
    *("cuda.devices.uuid", "cuda.devices.vram_free_bytes", "cuda.devices.context_bytes"),
    *("nvml.gpus.uuid", "nvml.gpus.vram_free_bytes"),
)


@check("STR-VRAM-OTHERS", "VRAM held by others", needs=OTHERS)
def others(m: Machine) -> Result | None:
    """Out of memory on a card that is big enough: another process holds its memory. Plans rest on what is free, never
    on the total."""
    held = {n: g for n, g in m.gpus.items() if g.display_active is False and _taken(g) >= _much(g)}
    if not m.nvml.gpus:
        return None
    if not held:
        return passed("No other process holds much VRAM.")
    evidence, pids = [], []
    for name, gpu in held.items():
        evidence.append(m.says("nvml.gpus", name + _use(gpu)))
        for process in gpu.processes or ():
            used = size(process.used_bytes) if process.used_bytes is not None else "use not reported"
            evidence.append(m.says("nvml.gpus", f"pid {process.pid} {process.name or ''}: {used}"))
            pids.append(str(process.pid))
    return warn(
        f"{size(sum(map(_taken, held.values())))} of VRAM are in use by other processes.",
        *evidence,
        remedy=m.per_os(
            linux=f"If they are yours and not needed: kill {' '.join(pids)}"
            if pids
            else "nvidia-smi shows the processes",
            windows="Task Manager, Details, column 'Dedicated GPU memory': end what is not needed",
        ),
    )


@check("STR-VRAM-TRUTHS", "Two figures for free VRAM", needs=FREE)
def two_truths(m: Machine) -> Result | None:
    """CUDA says 10.8 GiB free and the driver 9.8: under WDDM the first is a budget, the second what is there now.
    Memory is not resident until touched. Plans rest on the lower figure. Of a MIG slice the driver's figure is that of
    the whole card, so there is nothing to compare."""
    if m.cuda.devices and any(gpu.mig for gpu in m.nvml.gpus):
        return unknown("The driver's figure is of the whole card, CUDA's of one MIG slice: they cannot be compared.")
    by_uuid = {gpu.uuid: (name, gpu.vram_free_bytes) for name, gpu in m.gpus.items() if gpu.uuid}
    apart = []
    for device in m.cuda.devices:
        name, driver_free = by_uuid.get(device.uuid or "", ("", None))
        if driver_free is None or device.vram_free_bytes is None or device.context_bytes is None:
            continue
        cuda_free = device.vram_free_bytes + device.context_bytes
        if cuda_free - driver_free >= TRUTHS_APART:
            apart.append((name, cuda_free, driver_free))
    if not apart:
        return passed("CUDA and the driver agree on free VRAM.") if m.cuda.devices else None
    name, cuda_free, driver_free = max(apart, key=lambda row: row[1] - row[2])
    return warn(
        f"CUDA promises {size(cuda_free - driver_free)} more of {name} than the driver has free.",
        m.says("cuda.devices", f"{size(cuda_free)} free, this process's context added back"),
        m.says("nvml.gpus", f"{size(driver_free)} free"),
        remedy=f"Plans rest on the lower figure: --vram-budget {driver_free // MIB}MiB says the same",
    )


@check("STR-VRAM-TOUCHED", "VRAM that is really there", needs=("pinned.ballast_resident_bytes",))
def touched(m: Machine) -> Result | None:
    """Where Windows manages VRAM a grant is only a promise: memory may lie in RAM though every byte of it was written,
    and what works on it crawls. `strata doctor MODEL --deep` holds and writes a plan's device memory and asks the
    driver how much of it is in VRAM."""
    held, there = (m.pinned.ballast_bytes, m.pinned.ballast_resident_bytes) if m.pinned else (0, None)
    if not held:
        return None
    if there is None or held - there <= max(held // 32, 64 * MIB):
        return passed("Device memory that was written is in VRAM.")
    return warn(
        f"{size(held)} of VRAM were granted and written, and only {size(there)} are there: the rest went to RAM.",
        m.says("pinned.ballast_resident_bytes", f"use of VRAM rose by {size(there)} while {size(held)} were written"),
        remedy=f"Keep that much more free: --vram-reserve-mib {(held - there) // MIB + 512}",
    )


@check("STR-VRAM-CONTEXT", "Size of the CUDA context", needs=("cuda.devices.context_bytes",))
def context(m: Machine) -> Result | None:
    """The context, its modules and library workspaces take 100 to 550 MiB that are not in any tensor. They are measured
    and charged; an old module on a new GPU, or eager loading of many, makes them larger."""
    sizes = {f"{d.name or 'device'} (CUDA {d.ordinal})": d.context_bytes or 0 for d in m.cuda.devices}
    large = {name: n for name, n in sizes.items() if n > LARGE_CONTEXT}
    if not sizes:
        return None
    if not large:
        return passed("The CUDA context has an ordinary size.")
    return warn(
        f"The CUDA context takes {size(max(large.values()))}.",
        *(m.says("cuda.devices", f"{name}: context and modules {size(n)}") for name, n in large.items()),
        remedy="strata plan MODEL plans with the measured size; CUDA_MODULE_LOADING=LAZY makes it smaller",
    )


@check("STR-VRAM-SPILL", "VRAM paged to RAM", needs=("run.decode_tokens_per_s", "run.vram_free_loaded_bytes"))
def spill(m: Machine) -> Result | None:
    """Under Windows and WSL2 an overfull card does not fail: memory is paged to RAM without a word, and decode drops
    from 102 to 13.7 tokens per second. A reserve prevents it."""
    now, usual, free = (
        m.last_run.decode_tokens_per_s,
        m.last_run.usual_decode_tokens_per_s,
        m.last_run.vram_free_loaded_bytes,
    )
    if m.host.os != "windows" and m.host.wsl != "wsl2":
        return None
    if now is None or usual is None or free is None or now >= usual / 2 or free >= SPILL_RESERVE:
        return passed("The last run kept its speed and left VRAM free.")
    return warn(
        f"The last run's VRAM was paged out: {now:.1f} tokens per second instead of {usual:.1f}.",
        m.says("run.vram_free_loaded_bytes", f"{size(free)} of VRAM free after loading"),
        m.says("run.decode_tokens_per_s", f"{now:.1f} tok/s, earlier {usual:.1f}"),
        remedy="--vram-reserve-mib 1024; in the NVIDIA Control Panel of Windows: CUDA - Sysmem Fallback Policy: "
        "Prefer No Sysmem Fallback",
    )


@check("STR-VRAM-RESERVE", "Reserve on a shared card", needs=("plan",))
def reserve(m: Machine) -> Result | None:
    """Windows gives VRAM to whoever draws. A plan that leaves less than 256 MiB free there invites silent paging."""
    if m.plan is None:
        return passed("The plan leaves a reserve.")
    if m.plan.device.backend != "cuda" or (m.host.os != "windows" and m.host.wsl != "wsl2"):
        return None
    thin = [b for b in m.plan.budgets if b.tier is Tier.VRAM and b.reserve_bytes < SPILL_RESERVE]
    if not thin:
        return passed("The plan leaves a reserve.")
    return warn(
        f"The plan leaves only {size(thin[0].reserve_bytes)} of VRAM free; Windows pages out what it needs.",
        m.says("plan", f"{thin[0].device}: {thin[0].formula}"),
        remedy="--vram-reserve-mib 700",
    )


@check("STR-VRAM-UNPLANNED", "Allocation outside the plan", needs=("run.refusal",))
def unplanned(m: Machine) -> Result | None:
    """Prompt processing dies after a good start: its buffers were in no plan. Every buffer has a line, the largest
    chunk's included; a refused call without a line is a bug."""
    error = m.last_run.refusal
    if error is None:
        return None
    if error.code != 2 or m.last_run.refused_line is not None or "alloc" not in (error.call or "").lower():
        return passed("The last run asked for nothing outside its plan.")
    return warn(
        "The last run ran out of memory for something that its plan has no line for.",
        m.says("run.refusal", error_text(error)),
        remedy="Send us: strata report. Until then: --vram-reserve-mib 1024 --prefill 256",
    )


@check("STR-VRAM-OVERRUN", "More VRAM than planned", needs=("run.planned_vram_bytes", "run.actual_vram_bytes"))
def overrun(m: Machine) -> Result | None:
    """A run may never take more of the device than its plan says; if the driver counted more, the plan missed
    something (context, modules, graphs)."""
    planned, actual = m.last_run.planned_vram_bytes, m.last_run.actual_vram_bytes
    if planned is None or actual is None or actual <= planned:
        return passed("The last run took no more VRAM than planned.")
    return warn(
        f"The last run took {size(actual - planned)} more VRAM than planned.",
        m.says("run.actual_vram_bytes", f"planned {size(planned)}, the driver counted {size(actual)}"),
        remedy=f"Send us: strata report. Meanwhile: --vram-reserve-mib {(actual - planned) // MIB + 512}",
    )


@check("STR-WIN-COMMIT", "Page file", needs=COMMIT, scope=("host.os",))
def page_file(m: Machine) -> Result | None:
    """Windows charges VRAM against RAM plus page file. With a small page file cudaMalloc fails while VRAM
    is free. What counts is the plan's memory; without a plan, all VRAM that is free."""
    if m.host.os != "windows":
        return None
    limit, used = m.host.commit_limit_bytes, m.host.commit_used_bytes
    if m.plan and m.plan.feasible:
        wanted = sum(r.bytes for r in m.plan.reservations if r.tier is not Tier.FILE)
        enough, what = "Windows can promise all memory of the plan.", f"the plan takes {size(wanted)} of VRAM and RAM"
    elif m.options.device == "cpu":
        return None
    else:
        wanted = sum(gpu.vram_free_bytes or 0 for gpu in m.nvml.gpus)
        enough, what = "Windows can promise as much memory as the GPU has free.", f"{size(wanted)} of VRAM are free"
    if limit is None or used is None or limit - used >= wanted:
        return passed(enough)
    return fail(
        f"Windows can promise {size(max(limit - used, 0))} more memory; {what}.",
        m.says("host.commit_limit_bytes", f"commit limit {size(limit)}, {size(used)} used"),
        *(
            [m.says("host.swap_total_bytes", f"page file {size(m.host.swap_total_bytes)}")]
            if m.host.swap_total_bytes is not None
            else []
        ),
        remedy="SystemPropertiesAdvanced.exe: Performance, Settings, Advanced, Virtual memory: 'System managed size'; "
        "then restart",
    )


@check("STR-VRAM-DISPLAY", "Desktop on the GPU", needs=("nvml.gpus.display_active",))
def display(m: Machine) -> Result | None:
    """A desktop drawn on the card takes VRAM when it likes, and stutters when there is none left. A monitor that is
    merely plugged in (display_mode) says nothing. Plans keep a larger reserve on such a card."""
    drawn = [name for name, gpu in m.gpus.items() if gpu.display_active]
    if not m.nvml.gpus:
        return None
    if not drawn:
        return passed("No desktop is drawn on an NVIDIA GPU.")
    other = next((a for a in m.adapters.adapters if a.integrated and a.vendor != "NVIDIA"), None)
    return warn(
        f"{', '.join(drawn)} draws the desktop: its free VRAM changes while you work.",
        *(m.says("nvml.gpus.display_active", f"{name}: display active{_use(m.gpus[name])}") for name in drawn),
        *(
            [m.says("adapters", f"{other.name or other.vendor or 'an integrated GPU'} could draw it instead")]
            if other
            else []
        ),
        remedy="Plug the monitor into the mainboard's connector (the integrated GPU)"
        if other
        else "Plans keep a larger reserve on it; where the desktop stutters, keep more: --vram-reserve-mib 2048",
    )


def _taken(gpu: NvmlGpu) -> int:
    """Return what programs hold: NVML counts what the driver keeps for itself as used, 615 MiB of an idle H200.

    Where an old driver does not say how much that is, a share is taken off that no card exceeds.
    """
    if gpu.vram_used_bytes is None or (gpu.vram_reserved_bytes is None and gpu.vram_total_bytes is None):
        return 0
    kept = gpu.vram_reserved_bytes if gpu.vram_reserved_bytes is not None else (gpu.vram_total_bytes or 0) // KEPT_SHARE
    return max(gpu.vram_used_bytes - kept, 0)


def _much(gpu: NvmlGpu) -> int:
    return max(TAKEN, (gpu.vram_total_bytes or 0) // TAKEN_SHARE)


def _use(gpu: NvmlGpu) -> str:
    used = f", {size(_taken(gpu))} in use" if gpu.vram_used_bytes is not None else ""
    return used + (f", {size(gpu.vram_free_bytes)} free" if gpu.vram_free_bytes is not None else "")
