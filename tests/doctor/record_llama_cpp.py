"""Records what buffers a real llama.cpp allocates: ``python -m tests.doctor.record_llama_cpp FOLDER >> LOG``.

FOLDER holds the golden models. Needs `xllamacpp`, as nothing else here does:
install it in an environment of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OTHERS = ("llama", "qwen3moe", "granitemoe", "olmoe", "qwen3next", "gpt-oss", "qwen4exp", "qwen35moe-Q4_K")
QUANTISED = [f"qwen3moe-{type_}" for type_ in ("Q4_K", "Q6_K", "IQ3_S", "IQ4_XS", "Q8_0", "MXFP4")]
CASES = (
    *(f"{name} -c 4096 -ctk f16 -ctv f16 -ub 512 --load-mode none" for name in (*OTHERS, *QUANTISED)),
    "llama -c 1000 -ctk f16 -ctv f16 -ub 64 --load-mode none",
    "llama -c 4096 -ctk f32 -ctv f32 -ub 512 --load-mode none",
    "qwen3moe-Q4_K -c 4096 -ctk q8_0 -ctv q8_0 -ub 512 --load-mode none",
    "qwen3moe-Q4_K -c 4096 -ctk f16 -ctv f16 -ub 512 --load-mode mmap",
    "qwen3moe -c 1300 -ctk f32 -ctv f32 -ub 128 --load-mode none",
    "qwen35moe-Q4_K -c 2000 -ctk q8_0 -ctv q8_0 -ub 256 --load-mode none",
)
CHILD = """
import os, sys, threading, xllamacpp as x
path, context, kv, chunk, mode = sys.argv[1:]
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_ubatch, p.n_batch, p.n_parallel = path, int(context), int(chunk), int(chunk), 1
p.n_gpu_layers, p.no_extra_bufts, p.warmup, p.fit_params, p.cache_ram_mib, p.verbosity = 0, True, False, False, 0, 4
p.load_mode = getattr(x.llama_load_mode, f"LLAMA_LOAD_MODE_{mode.upper()}")
p.cache_type_k = p.cache_type_v = getattr(x.ggml_type, f"GGML_TYPE_{kv.upper()}")
threading.Timer(20, lambda: os._exit(1)).start()
server = x.Server(p)  # its destructor waits for ever
os._exit(0)
"""
_BUFFER = re.compile(
    r"(load_tensors|llama_kv_cache|llama_memory_recurrent|sched_reserve|llama_context):.* buffer size.*"
)


def main() -> None:
    """Load each case in a process of its own and print its buffers' lines."""
    folder = Path(sys.argv[1])
    for case in CASES:
        name, _, context, _, kv, _, _, _, chunk, _, mode = case.split()
        command = [sys.executable, "-c", CHILD, str(folder / f"{name}.gguf"), context, kv, chunk, mode]
        log = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [" ".join(found[0].split()) for found in _BUFFER.finditer(log.stdout + log.stderr)]
        print("", case, *lines, sep="\n")


if __name__ == "__main__":
    main()
