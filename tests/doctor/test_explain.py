"""Error lines are recognised whole, paraphrased, cut off and in the middle of a log; others are not."""

import io
import time
from random import Random

import pytest
from rich.console import Console

from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.cuda_causes import CUDA_CODES
from strata.doctor.cuda_codes import NAMES
from strata.doctor.explain import MOST_LINES, explain
from strata.doctor.explain_view import explanations_view
from strata.doctor.known_errors import KNOWN_ERRORS, TROUBLE

LINES = [
    (
        "native embedding: cannot pin 322 MiB: no CUDA-capable device is detected, nor place it in VRAM",
        "STR-CTX-BROKEN",
    ),
    ("pinning 322 MB of the embedding failed because no CUDA device was found", "STR-CTX-BROKEN"),
    ("native embedding: cannot pin 322 MiB: no", "STR-CTX-BROKEN"),
    ("cannot pin 322 MiB: CUDA driver version is insufficient for CUDA runtime version", "STR-DRV-OLD"),
    ("CUDA driver version is insuff", "STR-DRV-OLD"),
    ("native embedding: cannot pin 322 MiB: out of memory", "STR-WSL-PIN"),
    ("cudaHostAlloc(536870912) failed: resource already mapped", "STR-WSL-PIN"),
    ("page-locking the embedding table did not work (CUDA says invalid argument)", "STR-WSL-PIN"),
    ("strata generate: native head upload: out of memory", "STR-PIN-COUPLED"),
    ("strata generate: native head upload: out of mem", "STR-PIN-COUPLED"),
    ("ran out of GPU memory while uploading the output head", "STR-PIN-COUPLED"),
    ("cudaHostRegister of the whole arena FAILED (out of memory)", "STR-PIN-CALL"),
    ("cudaHostRegister: invalid argument for 0.0 GiB", "STR-PIN-ZERO"),
    ("cudaHostRegister failed: invalid argument (13.8 GiB)", "STR-WSL-PIN"),
    ("VirtualLock stopped at 0 of 1302 MiB (error 87)", "STR-PIN-LOCK"),
    ("VirtualLock failed: 1314", "STR-PIN-LOCK"),
    ("VirtualLock GetLastError=1450", "STR-PIN-LOCK"),
    ("VirtualLock: error 1453, insufficient quota", "STR-PIN-LOCK"),
    ("warning: failed to mlock 4096-byte buffer: Cannot allocate memory", "STR-PIN-LOCK"),
    ("no VRAM left for the expert cache", "STR-PLAN-FIT"),
    (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5120.00 MiB on device 0: cudaMalloc failed: out of mem",
        "STR-VRAM-OTHERS",
    ),
    ("ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 5368709120", "STR-VRAM-OTHERS"),
    ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "STR-VRAM-OTHERS"),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total cap",
        "STR-VRAM-OTHERS",
    ),
    ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes", "STR-VRAM-OTHERS"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "STR-CUDA-ARCH"),
    ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "STR-CUDA-ARCH"),
    ("the provided PTX was compiled with an unsupported toolcha", "STR-CUDA-PTX"),
    ("Failed to initialize NVML: Driver/library version mismatch", "STR-DRV-MISMATCH"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "STR-DRV-NONE"),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "STR-DRV-LOST"),
    ("NVRM: Xid (PCI:0000:01:00): 31, MMU Fault", "STR-DRV-XID"),
    ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "STR-CUDA-FORK"),
    ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "STR-DRV-LIBCUDA"),
    ("ImportError: libnvrtc.so.12: cannot open shared object file", "STR-CUPY-IMPORT"),
    ("multiple CuPy packages are installed in your environment", "STR-CUPY-TWO"),
    ("OSError: [WinError 1455] The paging file is too small for this operation to complete", "STR-WIN-COMMIT"),
    ("misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12", "STR-WSL-RESIDENT"),
    ("cudaMallocHost failed", "STR-CTX-BROKEN"),
    ("kernel launch: out of memory, 3.1 GiB of VRAM free", "STR-PIN-LATCHED"),
    ("cudaLaunchKernel returned 2: out of memory", "STR-PIN-LATCHED"),
    ("11.3 GB planned, 16.6 GB locked", "STR-PIN-POOL"),
    ("VirtualLock: 1450", "STR-PIN-LOCK"),
    ("an illegal memory access was encountered", "STR-CUDA-STICKY"),
    ("forward compatibility was attempted on non supported HW", "STR-CUDA-COMPAT"),
    ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "STR-DRV-NONE"),
    ('Error response from daemon: could not select device driver "" with capabilities: [[gpu]].', "STR-DRV-LIBCUDA"),
    ("WSL environment detected but no adapters were found", "STR-WSL-GPU"),
    ("Unable to determine the device handle for GPU0000:01:00.0: Unknown Error", "STR-DRV-LOST"),
    ("CUresult=999", "STR-DRV-UVM"),
    (
        '"kv_cache" (KV cache, f16) takes 754 MiB and 292 MiB of VRAM are left for it; 644 MiB are missing in all.',
        "STR-PLAN-FIT",
    ),
    ("/usr/include/bits/mathcalls.h(79): error: exception specification is incompatible: rsqrt noexcept", None),
    ("RuntimeError: CUDA error: device-side assert triggered", None),
    ("misc dxg: dxgk: dxgkio_query_adapter_info: Ioctl failed: -22", None),
    ("Out of memory: Killed process 30122 (python3)", "STR-RAM-OOM"),
    ("RuntimeError: No CUDA GPUs are available", "STR-CUDA-HIDDEN"),
    ("Failed to initialize NVML: Unknown Error", "STR-DRV-NVML"),
    ("cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY", "STR-WSL-PIN"),
    ("OSError: [Errno 12] Cannot allocate memory", "STR-RAM-SHORT"),
    ("fork: retry: Resource: Cannot allocate memory", "STR-RAM-SHORT"),
    ("warning: failed to mlock 1048576-byte buffer: Cannot allocate memory", "STR-PIN-LOCK"),
    ("VirtualLock of the arena returned 1314: A required privilege is not held", "STR-PIN-LOCK"),
    ("VirtualLock failed with error 1453", "STR-PIN-LOCK"),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB", "STR-RAM-SHORT"),
]
UNKNOWN = [
    "hello world",
    "the pinned tweet failed to load",
    "error 87",
    "error: file not found",
    "Traceback (most recent call last):",
    "all good, no errors",
    "loading tensor 12: 322 MiB pinned",
    "failed to pin down the cause",
    "KeyError: 'head'",
    "HTTP 404",
    "code 100",
    "",
    "🦆 \x00 \ud800",
]


@pytest.mark.parametrize(("line", "check"), LINES)
def test_a_line_is_recognised(line: str, check: str | None) -> None:
    found = explain(line)
    assert [e.check for e in found] == [check]
    assert found[0].cause
    assert found[0].remedy


def test_a_run_log_of_ours_is_explained_in_words() -> None:
    log = "\n".join(
        [
            '{"event":"plan","plan":{"notes":["could not be measured: out of memory"]}}',
            '{"event":"allocation","line":"dense","code":"ok"}',
            '{"event":"allocation","line":"experts","code":"VirtualLock: refused (1314 X)","call":"VirtualLock"}',
            '{"event":"error","type":"KernelError","message":"decode: it failed","call":"launchKernel",'
            '"code":"CUDA_ERROR_OUT_OF_MEMORY: out of memory"}',
            '{"event":"error","message":"cut o',
        ]
    )
    lock, latched = explain(log)
    assert (lock.check, lock.line_number) == ("STR-PIN-LOCK", 3)
    assert lock.line == "allocation experts: VirtualLock: refused (1314 X)"
    assert (latched.check, latched.line_number) == ("STR-PIN-LATCHED", 4)
    assert latched.line == "error decode: it failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory: launchKernel"


@pytest.mark.parametrize("line", UNKNOWN)
def test_what_is_not_known_is_not_guessed(line: str) -> None:
    assert explain(line) == ()


@pytest.mark.parametrize("code", CUDA_CODES)
@pytest.mark.parametrize(
    "form",
    ["CUDA error {code}", "cuInit failed: {code}", "{name}", "{driver}", "CUDA error: {string}", "cudaError_t({code})"],
)
def test_cuda_codes_by_number_name_and_string(code: int, form: str) -> None:
    known = CUDA_CODES[code]
    found = explain(form.format(code=code, name=known.name, driver=known.driver_name, string=known.string))
    assert len(found) == 1
    assert f"error {code}:" in found[0].title or found[0].check == known.check


def test_codes_have_the_names_that_cuda_gives_them() -> None:
    for code, known in CUDA_CODES.items():
        assert NAMES[code] == known.name


def test_checks_that_are_named_exist() -> None:
    named = [k.check for k in KNOWN_ERRORS] + [k.check for k in CUDA_CODES.values()]
    assert {check for check in named if check} <= set(CATALOGUE)


def test_an_error_in_a_long_log_is_found_with_its_line() -> None:
    noise = [f"2026-01-01 12:00:{n % 60:02} INFO loading layer {n}, 322 MiB pinned, GPU ok" for n in range(2000)]
    log = [*noise, "2026-01-01 12:40:00 ERROR native head upload: out of memory", *noise]
    found = explain("\n".join(log))
    assert [(e.check, e.line_number) for e in found] == [("STR-PIN-COUPLED", 2001)]


def test_wrapped_and_joined_lines_are_taken_apart() -> None:
    log = (
        "strata generate: expert arena: VirtualLock stopped at 0 of 1302 MiB (error 87); cudaHostRegister of the whole"
        " arena\n                 FAILED (out of memory); 47 slices pinned (45 GiB); large pages (2097152 B)\n"
        "strata generate: native head upload: out of memory\n"
    )
    assert [(e.check, e.line_number) for e in explain(log)] == [
        ("STR-PIN-LOCK", 1),
        ("STR-PIN-CALL", 1),
        ("STR-PIN-COUPLED", 3),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[31mERROR\x1b[0m native head upload: \x1b[1mout of\x1b[22m memory",
        "\x1b]0;alice@box: ~\x07ERROR native head upload: out of memory\r",
        "loading 10%\rloading 20%\rERROR native head upload: out of memory",
        "\x1b]8;;file:///x\x1b\\ERROR native head upload\x1b]8;;\x1b\\: out of memory",
    ],
)
def test_what_a_terminal_acts_on_hides_no_error_and_is_not_sent_to_another(line: str) -> None:
    (found,) = explain(f"first\r\n\r\n{line}\r\nlast")
    assert (found.line, found.line_number, found.check) == (
        "ERROR native head upload: out of memory",
        3,
        "STR-PIN-COUPLED",
    )


def test_a_binary_file_is_not_known() -> None:
    data = Random(7).randbytes(4 << 20)
    assert any(word in data.lower() for word in (b"xid", b"oom"))  # any short word turns up
    assert explain(data.decode("utf-8", "replace")) == ()


def test_of_too_many_different_lines_the_count_says_that_it_is_not_whole() -> None:
    (few,) = explain("".join(f"CUDA error 999 at {n:x}\n" for n in range(MOST_LINES)))
    (many,) = explain("".join(f"CUDA error 999 at {n:x}\n" for n in range(2 * MOST_LINES)))
    assert (few.times, few.or_more) == (MOST_LINES, False)
    assert (many.times, many.or_more) == (MOST_LINES, True)
    assert "999 at 0, 4,000 times or more" in " ".join(rendered(explanations_view([many])).split())


def rendered(view: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(view)
    return console.file.getvalue()


def test_repeated_lines_are_counted_once() -> None:
    log = "\n".join(f"2026-01-01 12:00:{n:02}.125 CUDA error 999" for n in range(50))
    (found,) = explain(log)
    assert (found.times, found.line_number) == (50, 1)


def test_the_words_of_trouble_cover_every_line_above() -> None:
    for line, _ in LINES:
        assert any(word in line.lower() for word in TROUBLE), line


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01 INFO layer 12 pinned 322 MiB gpu ok\n" * 80_000,
        "a" * 4_000_000,
        " cuda error" * 400_000,
        "".join(f"cuda error fail pin {n:x}\n" for n in range(8 * MOST_LINES)),
        "\n" * 2_000_000,
        "error (" * 500_000,
    ],
    ids=["quiet", "one word", "one line", "all trouble", "empty", "brackets"],
)
def test_megabytes_take_seconds(text: str) -> None:
    started = time.monotonic()
    explain(text)
    assert time.monotonic() - started < 15
