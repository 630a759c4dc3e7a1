"""The numpy backend beside llama.cpp on the same file, cores and tokens, in turn. Needs ``pip install xllamacpp``."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from strata.sources.demo import dense_demo_model
from tests.runtime.plans import machine

pytestmark = [pytest.mark.bench, pytest.mark.demo]
xllamacpp = pytest.importorskip("xllamacpp")

ROUNDS, PROMPT, STEPS = 7, 512, 32


def llama_cpp(path: Path, threads: int) -> Callable[[list[int], int], Any]:
    """Load a model; return what reads a prompt and makes tokens."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.n_batch, parameters.n_ubatch = 1024, 1, PROMPT, PROMPT
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def run(prompt: list[int], tokens: int) -> Any:
        options = {"prompt": prompt, "n_predict": tokens, "cache_prompt": False, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions(options)
        return json.loads(answer) if isinstance(answer, str) else answer

    return run


@pytest.mark.parametrize("threads", [1, 2])
def test_beside_llama_cpp(threads: int, tmp_path: Path) -> None:
    """Wall-clock time, and for one thread its CPU time, which other programs at work change less."""
    path = tmp_path / "dense.gguf"
    dense_demo_model(path, lambda what, done, total: None)
    theirs = llama_cpp(path, threads)
    clocks = {"wall": time.perf_counter} | ({"CPU": time.process_time} if threads == 1 else {})
    took: dict[tuple[str, str, str], list[float]] = {}
    with open_gguf(path) as file:
        facts = read_model_facts(file)
        plan = make_plan(machine(8 << 30), facts, PlanOptions(max_context=1024))
        prompt = np.random.default_rng(1).integers(1000, facts.vocab, PROMPT).tolist()
        with Engine.load(file, msgspec.structs.replace(plan, threads=threads)) as engine:

            def prefill() -> None:
                engine.resume(prompt[:1])
                engine.prefill(prompt)

            def decode() -> None:
                for token in prompt[:STEPS]:
                    engine.decode(token)

            def timed(who: str, what: str, work: Callable[[], object], *, less: str | None = None) -> None:
                before = {clock: now() for clock, now in clocks.items()}
                work()
                for clock, now in clocks.items():
                    seconds = now() - before[clock] - (took[who, less, clock][-1] if less else 0.0)
                    took.setdefault((who, what, clock), []).append(seconds)

            for work in (prefill, decode, lambda: theirs(prompt, 2)):  # warm
                work()
            for _ in range(ROUNDS):
                timed("Strata", "prompt", prefill)
                timed("llama.cpp", "prompt", lambda: theirs(prompt, 1))
                timed("Strata", "decode", decode)
                timed("llama.cpp", "decode", lambda: theirs(prompt, 1 + STEPS), less="prompt")
    for clock in clocks:
        for what, tokens in (("prompt", PROMPT), ("decode", STEPS)):
            speeds = {who: [tokens / seconds for seconds in took[who, what, clock]] for who in ("Strata", "llama.cpp")}
            ours, other = (statistics.median(each) for each in speeds.values())
            print(f"\n{threads} threads, {clock} time, {what}: Strata {ours:.1f}/s, llama.cpp {other:.1f}/s", end="")
            print(f": {ours / other:.2f} of it", {who: f"{min(s):.0f} to {max(s):.0f}" for who, s in speeds.items()})
