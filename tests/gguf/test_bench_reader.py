"""How fast a model with a large vocabulary opens. Run with: pytest -m bench -s tests/gguf"""

import gzip
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata.gguf.reader import open_gguf
from tests.gguf_maker import moe_model, write_gguf

pytestmark = pytest.mark.bench

VOCABULARY = Path(__file__).parents[2] / "fixtures" / "golden" / "vocab" / "qwen3-vocab.gguf.gz"
STRINGS = 250_000
LIMIT_SECONDS = 0.15
REPEATS = 15

FRESH_PROCESS = """
import sys, time
from strata.gguf.reader import open_gguf
began = time.perf_counter()
open_gguf(sys.argv[1])
print(time.perf_counter() - began)
"""


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 48 layers with 250,000 tokens, as many merges, and token types."""
    metadata, tensors = moe_model(layers=48)
    metadata["tokenizer.ggml.tokens"] = [f"Ġtok{index:x}" for index in range(STRINGS)]
    metadata["tokenizer.ggml.merges"] = [f"Ġt{index:x} ok{index:x}" for index in range(STRINGS)]
    metadata["tokenizer.ggml.token_type"] = np.ones(STRINGS, np.int32)
    return write_gguf(tmp_path_factory.mktemp("bench") / "large.gguf", metadata, tensors)


def report(what: str, seconds: list[float]) -> float:
    """Print best, median and worst in milliseconds; return the median."""
    median = statistics.median(seconds)
    best, worst = min(seconds), max(seconds)
    print(f"\n{what}: best {1e3 * best:.0f}, median {1e3 * median:.0f}, worst {1e3 * worst:.0f} ms of {len(seconds)}")
    return median


def timed(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def test_opening_in_a_running_process(large_vocabulary: Path) -> None:
    assert report("open, same process", timed(lambda: open_gguf(large_vocabulary))) < LIMIT_SECONDS


def test_opening_in_a_fresh_process(large_vocabulary: Path) -> None:
    command = [sys.executable, "-c", FRESH_PROCESS, str(large_vocabulary)]
    seconds = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(REPEATS)
    ]
    assert report("open, fresh process, imports excluded", seconds) < LIMIT_SECONDS


def test_importing_the_reader() -> None:
    code = "import time; began = time.perf_counter(); import strata.gguf.reader; print(time.perf_counter() - began)"
    command = [sys.executable, "-c", code]
    report(
        "import of the reader (mostly numpy)",
        [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(REPEATS)],
    )


def test_decoding_the_strings(large_vocabulary: Path) -> None:
    def decode() -> None:
        metadata = open_gguf(large_vocabulary).metadata
        began = time.perf_counter()
        assert len(metadata["tokenizer.ggml.tokens"]) + len(metadata["tokenizer.ggml.merges"]) == 2 * STRINGS  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - began)

    seconds: list[float] = []
    timed(decode, repeats=5)
    report("decode 250,000 tokens and as many merges", seconds)


def test_building_the_tokenizer(tmp_path: Path) -> None:
    """The part of a start that opening does not contain: BPE from the Qwen3 vocabulary and merges."""
    from tokenizers import models

    path = tmp_path / "qwen3.gguf"
    path.write_bytes(gzip.decompress(VOCABULARY.read_bytes()))

    def build() -> None:
        metadata = open_gguf(path).metadata
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        began = time.perf_counter()
        models.BPE(
            {token: index for index, token in enumerate(tokens)},  # type: ignore[arg-type]
            [tuple(merge.split(" ", 1)) for merge in merges],  # type: ignore[union-attr]
        )
        seconds.append(time.perf_counter() - began)

    seconds: list[float] = []
    timed(build, repeats=5)
    report("build the BPE tokenizer of Qwen3 (151,936 tokens)", seconds)
    report("open the Qwen3 vocabulary", timed(lambda: open_gguf(path)))
