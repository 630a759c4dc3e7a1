"""Error lines that people meet, of this engine and of others: how to recognise each, what it is and what helps.

A rule names ideas that must all occur in one line, in whatever words; rules are tried from the specific to the
general, and the first that fits a line explains it. CUDA's codes come from their own table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from strata.doctor.cuda_packages import CUDA12, CUDA13

PIN = (
    r"\bpin(?:s|ned|ning)?\b|page.?lock|cuda_?(?:host_?(?:alloc|register)|malloc_?host)"
    r"|cuMemHost(?:Alloc|Register)|host_?register"
)
REGISTER = r"host_?register|\bregister(?:s|ed|ing)?\b"
NO_MEMORY = (
    r"out[ -]of[ -](?:\w+[ -])?mem|\boom\b|\bran out\b|not enough (?:\w+ )?memory|insufficient (?:\w+ )?memory"
    r"|MemoryAllocation|(?:\b|_)OUT_OF_MEM|ENOMEM|cannot allocate memory"
)
NO_DEVICE = (
    r"no CUDA.?(?:cap|device)|NoDevice\b|\bNO_DEVICE\b"
    r"|no (?:usable |supported )?(?:cuda |nvidia )?(?:gpu|device)s? (?:is |was |were |are )?(?:detected|found|avail)"
)
FAILED = r"fail|cannot|can't|could ?n[o']t|unable|refus|error|stopped|denied|reject|not possible"
PIN_SIZE = (
    r"(?:cannot|can't|could ?n[o']t|failed to|unable to|refus\w*)\b.{0,40}\d+(?:\.\d+)? ?[KMG]i?B"
    r"|\d+ ?[KMG]i?B.{0,30}(?:fail|refus|reject|denied)"
    r"|(?:fail|refus|reject|could ?n[o']t) .{0,60}\b(?:buffer|memory|alloc\w*)\b.{0,20}\b(?:error|code) \d+\b"
)
NOT_THERE = (
    r"cannot open|not found|no such file|could not (?:load|find)|(?:unable|failed) to (?:load|find)"
    r"|could not be found"
)


class KnownError(NamedTuple):
    """One rule. `check` is the id of the check that looks for the same cause in the facts."""

    check: str | None
    title: str
    ideas: tuple[str, ...]
    cause: str
    remedy: str


KNOWN_ERRORS: tuple[KnownError, ...] = (
    KnownError(  # before all that look for a program's name: the line names whom it killed
        "STR-RAM-OOM",
        "Killed for want of RAM",
        (r"out of memory: killed process|oom-kill|oom_reaper|\bOOMKilled\b|memory cgroup out of memory",),
        "the kernel ended a process because RAM, or the container's limit, was used up",
        "Plan with less: --ram-budget SIZE; or a larger limit: docker run --memory=SIZE",
    ),
    KnownError(
        "STR-RAM-SHORT",
        "RAM exhausted (another engine)",
        (
            r"DefaultCPUAllocator|\bCPU(?:_Mapped|_REPACK)? buffer|ggml_backend_cpu_\w*alloc\w*|ggml_aligned_malloc"
            r"|requires more system memory|memory allocation of \d+ bytes failed",
            NO_MEMORY + "|fail|unable|requires more",
        ),
        "a request for ordinary RAM was refused, not one for VRAM: the model's part that stays in RAM is too large",
        "Close other programs, or a smaller model or context; strata doctor MODEL says how much RAM a model takes here",
    ),
    KnownError(
        "STR-DRV-OLD",
        "Driver too old for the container",
        (r"unsatisfied condition: *(?:cuda|driver)\s*[<>=]",),
        "the container's image asks for a newer CUDA than the host's driver supports",
        "Install a newer driver on the host, or take an image for the driver's CUDA (nvidia-smi shows which)",
    ),
    KnownError(
        None,
        "Device memory pools not supported",
        (r"malloc_?async|mem_?pool", r"not supported|NotSupported|\b801\b"),
        "the GPU or driver has no stream-ordered allocator (virtual GPUs, some old cards, WSL2 with an old driver); "
        "nothing is wrong with page-locked memory",
        "Let the program use plain cudaMalloc (PyTorch: PYTORCH_CUDA_ALLOC_CONF=backend:native), or a newer driver",
    ),
    KnownError(
        "STR-PIN-COUPLED",
        "Output head refused",
        (r"\b(?:native|output|lm)[ _-]?head\b|\bhead (?:upl|alloc|buffer)", NO_MEMORY),
        "the device memory for the output head was refused: what was placed before it (a KV cache wholly in VRAM, the "
        "expert cache) left no room, or, on Windows, much page-locked memory made device memory run out although the "
        "card had VRAM free. A card without a display asks for more and meets this sooner",
        "All device memory first, pinning last, and every byte planned: strata plan MODEL. Elsewhere: pin less, keep a "
        "part of the KV cache in RAM, or a shorter context",
    ),
    KnownError(
        "STR-DRV-OLD",
        "Driver too old",
        (r"driver version is insuff|Insufficient_?Driver|driver (?:on your system )?(?:is )?too old",),
        "the NVIDIA driver is older than the CUDA runtime needs (CUDA 12: 525, on Windows 528; CUDA 13: 580), or "
        "libcuda was not found; the call named in the line (a page-locked request, say) only happened to come first",
        f"Install a newer driver, or CuPy for its CUDA: {CUDA12}",
    ),
    KnownError(
        "STR-CTX-BROKEN",
        "No usable CUDA context",
        (PIN, NO_DEVICE),
        "not a page-locking problem: this process cannot use CUDA at all, and its first call gets the blame. The CUDA "
        "runtime or toolkit does not match the driver, or the GPU is hidden from the process",
        "strata doctor shows device count, versions and library paths; rebuild with, or install, the CUDA version that "
        "the driver supports; check CUDA_VISIBLE_DEVICES",
    ),
    KnownError(
        "STR-PIN-ZERO",
        "Empty range page-locked",
        (
            REGISTER,
            rf"{PIN}|cuda",
            r"invalid (?:arg|value)",
            r"(?<![\d.])0(?:\.0+)? ?(?:[KMGT]i?)?B(?:ytes)?\b|zero.?byte|empty range",
        ),
        "cudaHostRegister was given a range of zero bytes",
        "Update the engine; empty ranges must not be registered",
    ),
    KnownError(
        "STR-PIN-CALL",
        "One large registration refused",
        (REGISTER, rf"{PIN}|cuda|\d ?[KMG]i?B", r"whole|entire|arena|slices?", FAILED),
        "registering one large range was refused; Windows and some drivers limit a single call, and slices of it are "
        "granted. By itself this is harmless when slices follow",
        "Nothing, where slices were pinned afterwards; else pin less: --pinned-budget SIZE",
    ),
    KnownError(
        "STR-PIN-LOCK",
        "VirtualLock: size",
        (r"VirtualLock", r"\b87\b|invalid param|parameter is incorrect"),
        "error 87: the size is not a multiple of the large page; locking in RAM is optional, and no page-locking for "
        "the GPU failed by it",
        "Nothing to do; it costs speed only when RAM runs short",
    ),
    KnownError(
        "STR-PIN-LOCK",
        "VirtualLock: privilege",
        (r"VirtualLock|large page|lock pages", r"\b1314\b|privilege"),
        "error 1314: the account lacks the privilege 'Lock pages in memory'",
        "secpol.msc: Local Policies, User Rights Assignment, 'Lock pages in memory': add your user, then sign in anew",
    ),
    KnownError(
        "STR-PIN-LOCK",
        "VirtualLock: quota",
        (r"VirtualLock|large page|working set", r"\b145[03]\b|insufficient (?:system )?(?:quota|resources)"),
        "error 1450 or 1453: the system's pool or the process's quota for locked memory is used up",
        "Close other programs or restart; locking in RAM is optional",
    ),
    KnownError(
        "STR-PIN-LOCK",
        "mlock refused",
        (r"\bmlock(?:all|2)?\b|RLIMIT_MEMLOCK", FAILED + "|" + NO_MEMORY),
        "RLIMIT_MEMLOCK is too low for locking memory in RAM; it does not limit what CUDA page-locks, and is optional",
        "ulimit -l unlimited (for good: 'USER - memlock unlimited' in /etc/security/limits.conf)",
    ),
    KnownError(
        "STR-WSL-PIN",
        "Page-locked memory refused",
        (PIN, NO_MEMORY + r"|invalid (?:arg|value)|already mapped|AlreadyMapped|\b208\b"),
        "the budget of page-locked host memory is exhausted, though RAM and VRAM may be free: 0.5 to 1 GiB under most "
        "WSL2, about half of RAM on Windows",
        "strata doctor measures the budget; keep inside it: --pinned-budget 512MiB. What exceeds it stays pageable",
    ),
    KnownError(
        "STR-CTX-BROKEN",
        "Page-locked memory refused, cause cut off",
        (PIN, rf"{PIN_SIZE}|cuda\w*(?:host|Host)\w* (?:failed|refused)"),
        "a page-locked request was refused; the line does not say why. If device memory still works it is a budget; if "
        "every CUDA call fails, this process has no usable context",
        "strata doctor tells the two apart",
    ),
    KnownError(
        "STR-PLAN-FIT",
        "No VRAM left for experts",
        (r"(?:no|not enough|insufficient) (?:vram|room|gpu memory|device memory)", r"expert|cache|slots?"),
        "the dense weights, KV cache and reserve alone exceed the card",
        "strata plan MODEL names the smallest change that works (a shorter --max-context, --kv int8)",
    ),
    KnownError(
        "STR-VRAM-OTHERS",
        "VRAM full (llama.cpp)",
        (r"ggml|llama|CUDA\d buffer", NO_MEMORY + r"|(?:failed|unable) to allocate|alloc\w* .*fail|buffer_alloc"),
        "llama.cpp asked for a buffer that the GPU has no room for: weights, KV cache and compute buffers together "
        "exceed what is free",
        "Fewer layers on the GPU (-ngl) or experts on the CPU (-ncmoe N), a smaller -c or -ub; nvidia-smi shows who "
        "else holds VRAM",
    ),
    KnownError(
        "STR-VRAM-OTHERS",
        "VRAM full (PyTorch)",
        (r"torch|tried to allocate|reserved by pytorch|PYTORCH_", NO_MEMORY + r"|tried to allocate"),
        "PyTorch asked for more VRAM than was free; the line says how much was asked, how much is free, and often "
        "which other process holds memory",
        "Stop the other process (nvidia-smi), a smaller batch or context; where free memory is in pieces: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    KnownError(
        "STR-VRAM-OTHERS",
        "VRAM full (vLLM)",
        (r"no available memory for the cache blocks|free memory on device .*less than desired",),
        "vLLM wants a share of the whole card, and what is free after the weights, or before them, is less",
        "Stop the other process (nvidia-smi); a lower --gpu-memory-utilization where others hold VRAM, a higher one "
        "where the cache has no room; a shorter --max-model-len",
    ),
    KnownError(
        "STR-VRAM-OTHERS",
        "VRAM full",
        (r"CUBLAS_STATUS_ALLOC_FAILED|\b(?:gpu|cuda|device)\b.*\bran out of (?:vram|memory)|graph_reserve: failed to",),
        "a library asked for device memory (a workspace, a compute buffer) and the card had none left",
        "nvidia-smi shows who holds it; a smaller batch or context, or keep VRAM free: --vram-reserve-mib 1024",
    ),
    KnownError(
        "STR-VRAM-OTHERS",
        "VRAM full (CuPy)",
        (r"cupy", NO_MEMORY),
        "CuPy asked for more VRAM than was free",
        "nvidia-smi shows who holds it; --vram-budget SIZE keeps Strata within what is free",
    ),
    KnownError(
        "STR-WIN-COMMIT",
        "Page file too small",
        (r"paging file is too small|\b(?:win|os |system )?error[ :(]*1455\b|\bcommit(?:ment)? limit\b(?!.*\bpush)",),
        "Windows charges all memory, VRAM included, against RAM plus page file, and that is used up",
        "SystemPropertiesAdvanced.exe: Performance, Settings, Advanced, Virtual memory: 'System managed size'; restart",
    ),
    KnownError(
        "STR-WSL-RESIDENT",
        "GPU memory not made resident",
        (r"dxgk\w*make_resident", r"-12\b"),
        "Windows had no memory to make a GPU allocation of WSL2 resident",
        "Close GPU programs on Windows; plan with less: --vram-budget SIZE",
    ),
    KnownError(
        None,
        "Harmless line of WSL2",
        (r"dxgk\w*(?:query_adapter_info|is_feature_enabled|reserve_gpu_va)", r"-(?:2|22)\b"),
        "WSL2's kernel logs this while CUDA works; it means nothing",
        "Nothing to do",
    ),
    KnownError(
        "STR-DRV-MISMATCH",
        "Driver and library differ",
        (r"driver/library version mismatch|API mismatch|nvml.*version mismatch",),
        "the driver was updated but its kernel module is still the old one",
        "sudo reboot",
    ),
    KnownError(
        "STR-DRV-NONE",
        "Driver does not answer",
        (
            r"couldn't communicate with the NVIDIA driver|nvml.*driver (?:is )?not loaded|modprobe: .*nvidia.*not found"
            r"|could not insert '?nvidia\w*'?:",
        ),
        "the NVIDIA kernel module is not loaded: not installed, not built for this kernel, or refused by Secure Boot",
        "sudo modprobe nvidia; where Secure Boot refuses its key: sudo mokutil --import the key that signed it, and "
        "reboot; where it is not installed, from your distribution (Ubuntu: sudo ubuntu-drivers install; Fedora: "
        "akmod-nvidia of RPM Fusion)",
    ),
    KnownError(
        "STR-DRV-LOST",
        "GPU lost",
        (r"fallen off the bus|GPU is lost|\b(?-i:Xid)\b.{0,40}\b79\b",),
        "the GPU no longer answers on its bus: power, riser or slot, heat, or a failed sleep",
        "Reboot; check the card's power connectors and riser",
    ),
    KnownError(
        "STR-DRV-XID",
        "GPU fault",
        (r"\bNVRM\b.*\bXid\b|\bXid \(PCI|\b(?-i:Xid) (?:error )?\d{1,3}\b",),
        "the driver reports a fault of the GPU; its number says which",
        "Look the number up: https://docs.nvidia.com/deploy/xid-errors; then reboot",
    ),
    KnownError(
        "STR-CUDA-ARCH",
        "Architecture not known to the compiler",
        (r"invalid value for --gpu-arch|unsupported gpu architecture|no kernel image|sm_\d+ is not compatible",),
        "the program or its compiler has no code for this GPU's architecture; NVRTC before 12.8 cannot make sm_120",
        f'pip install -U "nvidia-cuda-nvrtc-cu12>=12.8", or with a driver from 580 on: {CUDA13}',
    ),
    KnownError(
        "STR-CUDA-FORK",
        "CUDA after a fork",
        (r"re-?initialize CUDA in forked|forked subprocess|cuda.*\bafter (?:a )?fork",),
        "CUDA cannot be used in a process forked after CUDA had started",
        "Start workers by 'spawn'",
    ),
    KnownError(
        "STR-CUDA-BUSY",
        "GPU busy",
        (r"CUDA-capable device\(s\) is/are busy or unavail",),
        "another process has the GPU to itself (exclusive mode), or the driver is just starting or stopping it",
        "nvidia-smi shows who; an administrator can allow several: nvidia-smi -c DEFAULT",
    ),
    KnownError(
        "STR-CUPY-NONE",
        "CuPy is not installed",
        (r"no module named '?cupy",),
        "CuPy, through which Strata reaches the GPU, is not installed in this environment",
        f"{CUDA13} (before driver 580, or for a GPU older than an RTX 20: {CUDA12})",
    ),
    KnownError(
        "STR-CUPY-TWO",
        "Two CuPy packages",
        (r"multiple CuPy packages",),
        "two CuPy packages are installed over each other",
        f"pip uninstall -y cupy-cuda12x cupy-cuda13x, then: {CUDA13}",
    ),
    KnownError(
        "STR-PIN-LATCHED",
        "Out of memory at a kernel's launch",
        (r"launch", NO_MEMORY),
        "launching a kernel takes no memory to speak of: with VRAM free, an earlier refusal (a page-locked request, "
        "mostly) left its error behind and this call reports it; with none free, the card is full to the brim",
        "Pin less: --pinned-budget 0; keep VRAM free: --vram-reserve-mib 1024. The engine should read the error away "
        "where it is met",
    ),
    KnownError(
        "STR-PLAN-FIT",
        "The plan does not fit",
        (r"are left for it; .* (?:is|are) missing",),
        "the plan's lines together exceed that memory, by as many bytes as the line says; nothing was loaded",
        "The smallest change that works stands below the line: strata plan MODEL shows it again",
    ),
    KnownError(
        "STR-PIN-POOL",
        "More locked than planned",
        (r"\bplanned\b.*\d.*\b(?:locked|pinned)\b", r"[KMG]i?B"),
        "a pool rounds every page-locked request up to a power of two",
        "Allocate exactly, without the pool (Strata does); meanwhile plan for less: --pinned-budget SIZE",
    ),
    KnownError(
        "STR-DRV-NONE",
        "No NVIDIA driver",
        (r"no NVIDIA driver",),
        "the program found no driver: it is not installed, not loaded, or not passed into the container",
        "strata doctor; Ubuntu: sudo ubuntu-drivers install && sudo reboot; container: docker run --gpus all ...",
    ),
    KnownError(
        "STR-DRV-LIBCUDA",
        "Docker cannot pass the GPU on",
        (r"could not select device driver|unknown (?:or invalid )?runtime name: nvidia|nvidia-container-cli",),
        "the NVIDIA Container Toolkit is not installed or not known to Docker",
        "Install nvidia-container-toolkit; sudo nvidia-ctk runtime configure --runtime=docker; then restart Docker",
    ),
    KnownError(
        "STR-WSL-GPU",
        "WSL shows no GPU",
        (r"no adapters were found|WSL.*no (?:gpu|adapter)|GPU access blocked by the operating system",),
        "WSL2 passes no GPU on: /dev/dxg is missing, or Windows has no NVIDIA driver",
        "Install the driver in Windows; then: wsl --update; wsl --shutdown",
    ),
    KnownError(
        "STR-DRV-LOST",
        "GPU does not answer",
        (r"unable to determine the device handle|RmInitAdapter failed",),
        "the driver cannot reach this GPU: it fell off the bus, or its state is broken",
        "sudo dmesg | grep -i xid shows why; reboot; check the card's power connectors and riser",
    ),
    KnownError(
        None,
        "Toolkit and compiler do not match",
        (r"(?:rsqrt|mathcalls|math_functions)\b.*(?:noexcept|exception specification)|unsupported GNU version",),
        "the CUDA toolkit does not know this version of GCC or glibc (CUDA 13.0 with GCC 15.2, for one)",
        "Build with a newer toolkit (13.3 knows GCC 15), or an older compiler: -ccbin g++-14",
    ),
    KnownError(
        None,
        "A kernel's own check failed",
        (r"device-side assert(?!ions)",),
        "a kernel found a value that must not be (an index beyond its array, mostly): a bug in the program, not in the "
        "machine; the process cannot go on",
        "Start anew; for the line at fault: CUDA_LAUNCH_BLOCKING=1",
    ),
    KnownError(
        "STR-DRV-LIBCUDA",
        "libcuda not found",
        (r"(?:lib)?cuda\.so|nvcuda\.dll", NOT_THERE + r"|WinError 126", r"^(?!.*\bsymbol)"),  # then it was found
        "the driver's CUDA library is not on the search path",
        "Install the driver's compute library (Ubuntu: libnvidia-compute-NNN); container: docker run --gpus all ...",
    ),
    KnownError(
        "STR-CUPY-IMPORT",
        "A CUDA library is missing",
        (r"(?:lib)?(?:nvrtc|cudart|cublas|nvJitLink)\w*[.-]?(?:so|dll|alt)?", NOT_THERE),
        "a library of the CUDA toolkit, which CuPy loads when it needs it, is not installed",
        f"{CUDA13}, which brings NVRTC and the runtime (before driver 580: {CUDA12})",
    ),
    KnownError(
        "STR-CUDA-HIDDEN",
        "No GPU for this process",
        (r"no (?:cuda )?gpus? (?:are |is |was |were )?(?:available|found|detected|visible)|^\W*no devices were found",),
        "CUDA shows this process no GPU: CUDA_VISIBLE_DEVICES hides them, the container was given none, or no driver "
        "answers",
        "strata doctor tells which; unset CUDA_VISIBLE_DEVICES; container: docker run --gpus all ...",
    ),
    KnownError(
        "STR-DRV-NVML",
        "GPU taken from a running container",
        (r"Failed to initialize NVML: Unknown Error",),
        "inside a container: the host's systemd reloaded its units and took the GPU's device files from it",
        "Start the container anew; for good, let the runtime use the cgroupfs driver, or pass the devices on: "
        "docker run --device /dev/nvidiactl --device /dev/nvidia0 --device /dev/nvidia-uvm ...",
    ),
    KnownError(
        "STR-RAM-SHORT",
        "RAM exhausted",
        (
            r"\b_?(?:Array)?MemoryError\b|std::bad_alloc|failed to mmap|os error 12\b|\[Errno 12\]|\bENOMEM\b"
            r"|cannot allocate memory",
        ),
        "a request for ordinary RAM was refused: all is in use, or this process is limited (ulimit -v, strict "
        "overcommit)",
        "Close other programs, plan with less (--ram-budget SIZE), or raise the limit: strata doctor names it",
    ),
)  # fmt: skip

# A line without any of these reports no error, whatever else it says.
TROUBLE = tuple(
    re.split(
        r",\s+",
        """error, fail, cannot, n't,
        could not, unable, refus, denied, reject, insuff, not enough, out of, out-of, out_of,
        ran out, oom, enomem, no cuda, no room, no vram, no kernel, no device, no usable, no gpu, no nvidia, no_device,
        invalid, unsupported, too old, too small, too low, busy, already mapped, not yet, not found, timed out, illegal,
        non supported, no adapters, unknown runtime, unsupported gnu, missing, assert, noexcept, locked, stopped,
        virtuallock, curesult, lost, mismatch, fork, multiple cupy, combination, killed, bad_alloc, xid, fallen, dxgk,
        fatal, no available memory, less than desired, alloc_failed, blocked, no module, requires more,
        no devices, winerror,
        tried to allocate, not work, not possible, not ready, not compatible, not have enough, no such""",
    )
)
