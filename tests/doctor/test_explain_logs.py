"""Lines of other programs' logs: those that say what is wrong, and their neighbours that only sound so."""

import pytest

from strata.doctor.explain import explain

LINES = [
    (
        "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.",
        "STR-RAM-SHORT",
    ),
    ("llama_model_load: unable to allocate CPU buffer", "STR-RAM-SHORT"),
    ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 123", "STR-RAM-SHORT"),
    ("ggml_aligned_malloc: insufficient memory (attempted to allocate 100.00 MB)", "STR-RAM-SHORT"),
    ("Out of memory: Killed process 4242 (llama-server) total-vm:81kB, anon-rss:1kB", "STR-RAM-OOM"),
    ("Out of memory: Killed process 4242 (torchrun)", "STR-RAM-OOM"),
    (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver",
        "STR-DRV-OLD",
    ),
    ("cudaMallocAsync failed: operation not supported", None),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "STR-DRV-OLD"),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "STR-CUDA-BUSY"),
    (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "STR-VRAM-OTHERS",
    ),
    (
        "ValueError: Free memory on device (5.2/23.6 GiB) on startup is less than desired GPU memory utilization",
        "STR-VRAM-OTHERS",
    ),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "STR-VRAM-OTHERS"),
    ("Failed to initialize NVML: GPU access blocked by the operating system", "STR-WSL-GPU"),
    ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "STR-DRV-NONE"),
    ("OSError: [WinError 126] The specified module could not be found: nvcuda.dll", "STR-DRV-LIBCUDA"),
    ("ModuleNotFoundError: No module named 'cupy'", "STR-CUPY-NONE"),
    ("GPU ran out of VRAM", "STR-VRAM-OTHERS"),
    ("graph_reserve: failed to allocate compute buffers", "STR-VRAM-OTHERS"),
    ("Error: model requires more system memory (41.2 GiB) than is available (30.1 GiB)", "STR-RAM-SHORT"),
    ("memory allocation of 8589934592 bytes failed", "STR-RAM-SHORT"),
    ("cuInit failed with 100", "STR-CTX-BROKEN"),
    ("could not page lock buffer: error 2", "STR-CTX-BROKEN"),
    ("pinned allocation of 2GB rejected", "STR-CTX-BROKEN"),
    ("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x26:0x56:1474)", "STR-DRV-LOST"),
    ("No devices were found", "STR-CUDA-HIDDEN"),
    ("cudaErrorInitializationError: initialization error", "STR-CUDA-FORK"),
    ("CUDA error: initialization error", "STR-CUDA-FORK"),
    ("modprobe: ERROR: could not insert 'nvidia': No such device", "STR-DRV-NONE"),
]
ORDINARY = [
    "failed to pin numpy in requirements.txt: error 5",
    "ggml_backend_cpu_reg: failed to read the list of features",
    "apt: could not pin package version, error 100",
    "Xidel: cannot open page",
    "INFO: 3 tests, 0 error 35 skipped, cuda backend",
    "loaded module nvcuda.dll, 2 symbols not found in export list",
    "git push rejected: commit limit of 50 per push",
    "the job pool is not supported",
    "dhclient[123]: DHCPREQUEST for 1.2.3.4 on eth0 to 255.255.255.255 port 67 (xid=0x3d1f) failed",
    "dhclient: DHCPREQUEST of 192.168.0.9 on eth0 (xid=0x2a17c3d) timed out",
    "dhclient: DHCPACK failed, xid 79",
    "cp: failed to preserve attributes: Operation not supported",
    "cp: cannot copy /usr/local/cuda/lib: Operation not supported",
    "loader: libcuda.so.1 could not find optional symbol",
    "cuda: 12 errors, 0 failed 35 passed",
    "failed to register handler 'whole'",
    "invalid argument: empty name cannot register",
    "commit limit of 5 pushes exceeded, rejected",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "Engine core initialization failed. See root cause above.",
    "postgres: database initialization failed",
    "could not insert 'nvidia_row' into table",
]


@pytest.mark.parametrize(("line", "check"), LINES)
def test_a_line_of_another_program_is_recognised(line: str, check: str | None) -> None:
    assert [e.check for e in explain(line)] == [check]


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_lines_are_no_errors_of_cuda(line: str) -> None:
    assert explain(line) == ()


def test_memory_pools_are_not_confused_with_page_locked_memory() -> None:
    (found,) = explain("cudaMallocAsync failed: operation not supported")
    assert "pools" in found.title
