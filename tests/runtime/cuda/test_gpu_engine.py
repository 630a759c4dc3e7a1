"""The engine on a GPU: right answers, one graph a token, memory as planned, and nothing left after a failure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from strata.doctor.plan import AllocationPlan, Tier  # noqa: E402
from strata.errors import AllocationFailed  # noqa: E402
from strata.gguf.model_facts import read_model_facts  # noqa: E402
from strata.gguf.reader import GGUFFile, open_gguf  # noqa: E402
from strata.kernels.launch import LoadedKernel  # noqa: E402
from strata.runtime.engine import Engine  # noqa: E402
from strata.runtime.sampler import Sampler, SamplerOptions  # noqa: E402
from tests.resident import FLOAT, GOLDEN, QUANTISED  # noqa: E402

from ..plans import planned as planned_for_cpu  # noqa: E402
from .machine import planned  # noqa: E402


@pytest.fixture
def file() -> Iterator[GGUFFile]:
    with open_gguf(GOLDEN / "qwen3moe-Q4_K.gguf") as file:
        yield file


def logits_of(file: GGUFFile, plan: AllocationPlan, tokens: list[int], first: int) -> list[np.ndarray]:
    with Engine.load(file, plan) as engine:
        found = [engine.prefill(tokens[:first]).copy()]
        return found + [engine.decode(token).copy() for token in tokens[first:]]


def errors(found: list[np.ndarray], expected: np.ndarray) -> np.ndarray:
    pairs = zip(found, expected, strict=True)
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", FLOAT + QUANTISED)
def test_golden_logits(name: str, kv: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    tokens, first = golden["tokens"].tolist(), 21
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        found = logits_of(file, planned(file, max_context=len(tokens), kv=kv), tokens, first)
    error = errors(found, golden["logits"][first - 1 :]).max()
    print(f"\n{name} {kv}: {error:.2e}", end="")
    assert error < (1e-3 if name in FLOAT else 2e-3)


@pytest.mark.parametrize("name", FLOAT + QUANTISED)
def test_int8_kv_cache_gives_numpys_logits(name: str) -> None:
    """The same codes but for those that rounding of float32 tips over, which on a few tokens may tip an expert, too."""
    golden = np.load(GOLDEN / f"{name}.npz")
    tokens, first = golden["tokens"].tolist(), 21
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        expected = logits_of(file, planned_for_cpu(file, max_context=len(tokens), kv="int8"), tokens, first)
        found = logits_of(file, planned(file, max_context=len(tokens), kv="int8"), tokens, first)
    error, of_f32 = errors(found, np.array(expected)), errors(found, golden["logits"][first - 1 :])
    print(f"\n{name}: {np.median(error):.2e}, at most {error.max():.2e}; of f32 {np.median(of_f32):.2e}", end="")
    assert np.median(error) < 1e-3
    if name in QUANTISED:
        assert error.max() < 5e-3
        assert of_f32.max() < 1e-2


@pytest.mark.parametrize("pinned", [None, 0], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("name", [*FLOAT, "qwen3moe-Q4_K", "qwen3moe-IQ3_S"])
def test_fewer_slots_give_the_same_bits(name: str, pinned: int | None) -> None:
    """At equal chunks, of which there are none of more than eight tokens where experts are missed."""
    tokens = np.load(GOLDEN / f"{name}.npz")["tokens"].tolist()
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        expected = logits_of(file, planned(file, max_context=len(tokens), prefill=8), tokens, 21)
        for slots in (2, 5):
            plan = planned(file, max_context=len(tokens), expert_cache=slots, pinned_budget_bytes=pinned)
            with Engine.load(file, plan) as engine:
                found = [engine.prefill(tokens[:21]).copy()]
                found += [engine.decode(token).copy() for token in tokens[21:]]
                counts = engine.expert_counts()
            np.testing.assert_array_equal(np.stack(found), np.stack(expected))
            each = read_model_facts(file).expert_classes[0].bytes
            tier = Tier.PAGEABLE if pinned == 0 else Tier.PINNED
            assert counts.filled_bytes == {tier: counts.misses * each}
            assert counts.misses - slots <= counts.evictions <= counts.misses


def test_with_page_locked_experts_a_token_is_one_graph_with_any_slots(file: GGUFFile) -> None:
    with Engine.load(file, planned(file, expert_cache=2)) as engine:
        engine.prefill(list(range(9)))
        step: Any = engine._model.step
        for token in range(5):
            before = step.launches
            engine.decode(token)
            assert step.launches == before + 1
        answer = list(engine.generate([1, 2, 3], Sampler(SamplerOptions()), max_tokens=9))
    with Engine.load(file, planned(file)) as engine:
        assert list(engine.generate([1, 2, 3], Sampler(SamplerOptions()), max_tokens=9)) == answer


@pytest.mark.parametrize("name", ["qwen3moe", "llama", "qwen3moe-Q4_K", "qwen3moe-IQ3_S"])
def test_chunks_of_any_size_give_the_same_bits(name: str) -> None:
    tokens = np.load(GOLDEN / f"{name}.npz")["tokens"].tolist()
    found = []
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        for chunk in (len(tokens), 27, 10):  # whose last chunks have more than eight tokens, too
            with Engine.load(file, planned(file, max_context=len(tokens) + 1, prefill=chunk)) as engine:
                found.append(engine.prefill(tokens[:50]).copy())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_a_token_launches_one_graph_and_nothing_else(file: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(file, planned(file)) as engine:
        engine.prefill(list(range(9)))
        step: Any = engine._model.step
        monkeypatch.setattr(LoadedKernel, "__call__", lambda *_: pytest.fail("a kernel was launched by itself"))
        for token in range(5):
            before = step.launches
            engine.decode(token)
            assert step.launches == before + 1


SAMPLED = [
    SamplerOptions(),
    SamplerOptions(temperature=0.8, top_k=40, seed=7),
    SamplerOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.1, seed=8),
    SamplerOptions(temperature=0.8, seed=9),  # from all: chosen on the host
]


@pytest.mark.parametrize("options", SAMPLED, ids=["greedy", "top-k", "all filters", "all tokens"])
@pytest.mark.parametrize("name", ["qwen3moe", "llama"])
def test_the_same_tokens_as_on_the_cpu(name: str, options: SamplerOptions) -> None:
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        answers = []
        for plan in (planned(file, kv="f32"), planned_for_cpu(file)):
            with Engine.load(file, plan) as engine:
                answers.append(list(engine.generate([1, 2, 3], Sampler(options), max_tokens=24)))
    assert answers[0] == answers[1]


def test_tokens_in_flight_leave_the_sequence_whole(file: GGUFFile) -> None:
    """Stopped anywhere, resumed, and continued by logits: as if nothing had been computed ahead."""
    sampler = Sampler(SamplerOptions())
    with Engine.load(file, planned(file, max_context=64)) as engine:
        step: Any = engine._model.step
        before = step.launches
        whole = list(engine.generate([1, 2, 3], sampler, max_tokens=60))
        assert step.launches - before == 59  # no step beyond what was asked for
        assert engine.position == 62
        for stop in (1, 5, 6):
            generation = engine.generate([1, 2, 3], sampler, max_tokens=60)
            part = [next(generation) for _ in range(stop)]
            generation.close()
            assert part == whole[:stop]
            assert engine.position == 3 + stop - 1
            rest = list(engine.generate([1, 2, 3, *part], sampler, max_tokens=20))
            assert rest == whole[stop : stop + 20]
        logits = engine.prefill([7]).copy()
    with Engine.load(file, planned(file, max_context=64)) as engine:
        engine.prefill([1, 2, 3, *whole[:25], 7][: 3 + 25])
        again = engine.prefill([7]).copy()
    np.testing.assert_array_equal(again, logits)


def test_what_is_taken_is_given_back(file: GGUFFile) -> None:
    plan = planned(file)
    with Engine.load(file, plan):
        pass
    before = cupy.cuda.runtime.memGetInfo()[0]
    with Engine.load(file, plan) as engine:
        engine.prefill([1, 2, 3])
        assert cupy.cuda.runtime.memGetInfo()[0] < before
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (2 << 20)


@contextlib.contextmanager
def ballast(left: int) -> Iterator[None]:
    """Take all of the device's memory but `left` bytes."""
    taken = cupy.cuda.runtime.malloc(cupy.cuda.runtime.memGetInfo()[0] - left)
    try:
        yield
    finally:
        cupy.cuda.runtime.free(taken)


def test_a_full_card_is_refused_by_line_code_and_words(file: GGUFFile) -> None:
    plan = planned(file, max_context=4096)
    with Engine.load(file, plan):
        pass
    with ballast(left=40 << 20):
        before = cupy.cuda.runtime.memGetInfo()[0]
        big = planned_for_a_gib(file)
        with pytest.raises(AllocationFailed) as caught:
            Engine.load(file, big)
        assert cupy.cuda.runtime.memGetInfo()[0] >= before - (2 << 20)
    assert caught.value.line == "kv_cache"
    for word in ("cudaMalloc", "out of memory", "cudaErrorMemoryAllocation", "CUDA device", "MiB free now", "WSL2"):
        assert word in caught.value.found
    with Engine.load(file, plan) as engine:  # and the device is as good as before
        assert np.isfinite(engine.prefill([1, 2, 3])).all()


def planned_for_a_gib(file: GGUFFile) -> AllocationPlan:
    """A plan whose KV cache takes over a GiB."""
    import msgspec

    plan = planned(file)
    lines = [
        msgspec.structs.replace(line, bytes=1 << 30) if line.id == "kv_cache" else line for line in plan.reservations
    ]
    return msgspec.structs.replace(plan, reservations=tuple(lines))


def test_ctrl_c_while_loading_leaves_nothing(file: GGUFFile) -> None:
    plan = planned(file)
    with Engine.load(file, plan):
        pass
    before = cupy.cuda.runtime.memGetInfo()[0]

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.load(file, plan, progress=interrupt)
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (2 << 20)
    with Engine.load(file, plan) as engine:
        assert np.isfinite(engine.prefill([1, 2, 3])).all()


LOST = """
import cupy
from strata.errors import DeviceFailed
from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from tests.resident import GOLDEN
from tests.runtime.cuda.machine import planned

if __name__ == "__main__":
    trap = cupy.RawKernel('extern "C" __global__ void trap_() { asm("trap;"); }', "trap_")
    with open_gguf(GOLDEN / "qwen3moe-Q4_K.gguf") as file:
        engine = Engine.load(file, planned(file))
        engine.prefill([1, 2, 3])
        trap((1,), (1,), ())
        try:
            engine.decode(4)
        except DeviceFailed as error:
            print(error.found)
        engine.close()
        print("closed")
"""


def test_a_failing_device_is_told_of_and_let_go(tmp_path: Path) -> None:
    """In a process of its own: after a fault none of a context's memory can be used."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    paths = os.pathsep.join([str(GOLDEN.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    for word in ("unspecified launch failure", "cudaErrorLaunchFailure", "719", "CUDA device", "free now", "WSL2"):
        assert word in result.stdout
    assert result.stdout.endswith("closed\n")
