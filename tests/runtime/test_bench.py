"""What `strata bench` measures: the right numbers of tokens, experts and bytes, whatever the clock says."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.plan import Tier
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.runtime.bench import BenchOptions, bytes_of_a_step, run_bench
from strata.runtime.engine import Engine

from .plans import planned

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "qwen3moe.gguf"
OPTIONS = BenchOptions(prompts=(8, 20), tokens=5, depths=(0, 12), repetitions=3, seed=4)


@pytest.mark.parametrize("slots", [None, 3])
def test_counts_are_those_of_the_repetitions_alone(slots: int | None) -> None:
    said: list[str] = []
    with open_gguf(GOLDEN) as file:
        facts = read_model_facts(file)
        plan = planned(file, max_context=OPTIONS.context, expert_cache=slots)
        with Engine.load(file, plan) as engine:
            results = run_bench(engine, facts, OPTIONS, said.append)
    assert [(r.test, r.tokens, r.depth) for r in results] == [
        ("prompt", 8, 0),
        ("prompt", 20, 0),
        ("decode", 5, 0),
        ("decode", 5, 12),
    ]
    assert len(said) == 4
    for r in results:
        assert len(r.tokens_per_s) == 3
        assert min(r.tokens_per_s) <= r.median_tokens_per_s <= max(r.tokens_per_s)
        assert facts.top_k * facts.layers <= r.distinct_experts <= facts.experts * facts.layers
        assert sum(r.filled_bytes.values()) == r.misses * facts.expert_classes[0].bytes
        assert set(r.filled_bytes) <= {Tier.PINNED, Tier.PAGEABLE, Tier.FILE}
    misses = sum(r.misses for r in results)
    if slots is None:  # an expert is missed once at most, and most were while warming up
        assert misses < facts.experts
    else:
        assert misses > facts.experts * facts.layers
    steps = results[2]
    assert steps.bytes_per_token == bytes_of_a_step(plan, facts, 2)
    assert steps.step_s is not None
    assert results[0].bytes_per_token is None


def test_a_step_reads_more_the_longer_the_cache() -> None:
    with open_gguf(GOLDEN) as file:
        facts, plan = read_model_facts(file), planned(file, max_context=64)
    kv = plan.line("kv_cache")
    assert kv is not None
    assert bytes_of_a_step(plan, facts, 64) - bytes_of_a_step(plan, facts, 0) == kv.bytes


def test_the_context_holds_the_longest_measurement() -> None:
    assert OPTIONS.context == 20
    assert BenchOptions(prompts=(), tokens=7, depths=(0, 9), repetitions=1, seed=0).context == 16
    assert BenchOptions(prompts=(), tokens=0, depths=(9,), repetitions=1, seed=0).context == 1
