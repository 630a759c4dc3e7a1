"""Measures a loaded model: prompts of given lengths, and steps at given depths, warm and repeated.

Tokens are random, from a seed: a greedy loop on a model of random weights repeats itself, and its experts with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np

from strata.doctor.plan import AllocationPlan, Tier
from strata.gguf.model_facts import ModelFacts
from strata.runtime.engine import Engine
from strata.runtime.expert_cache import CacheCounts

Report = Callable[[str], None]  # told what is measured next


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    prompts: tuple[int, ...]  # lengths, tokens
    tokens: int  # steps at each depth; 0 measures none
    depths: tuple[int, ...]  # tokens in front of the steps
    repetitions: int
    seed: int

    @property
    def context(self) -> int:
        """Tokens that the longest measurement needs."""
        steps = [max(depth, 1) + self.tokens for depth in self.depths if self.tokens]
        return max([*self.prompts, *steps, 1])


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. An expert counts once in each layer call that asks for it."""

    test: str  # "prompt" or "decode"
    tokens: int
    depth: int  # tokens in front of them
    tokens_per_s: tuple[float, ...]  # of each repetition
    median_tokens_per_s: float
    step_s: float | None  # median of all steps; None for prompts
    bytes_per_token: int | None  # weights and cache that a step reads from the device's memory; None for prompts
    bytes_per_s: float | None  # that is, at the median speed
    distinct_experts: int  # of all layers, in the last repetition
    hit_rate: float | None
    misses: int
    filled_bytes: dict[Tier, int]  # of missing experts, by where they came from
    filled_bytes_per_s: float  # over the time of all repetitions


def run_bench(engine: Engine, facts: ModelFacts, options: BenchOptions, report: Report) -> tuple[BenchResult, ...]:
    """Measure; each measurement runs once before it counts.

    Parameters
    ----------
    engine : Engine
        With a context of `BenchOptions.context` at least.
    facts : ModelFacts
        Of the same model.
    options : BenchOptions
    report : Report
    """
    rng = np.random.default_rng(options.seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, facts.vocab, count)]

    results = []
    for length in options.prompts:
        report(f"prompt of {length:,} tokens")
        results.append(_measure(engine, facts, options, draw, tokens=length, depth=None))
    for depth in options.depths if options.tokens else ():
        report(f"{options.tokens:,} steps after {depth:,} tokens")
        results.append(_measure(engine, facts, options, draw, tokens=options.tokens, depth=depth))
    return tuple(results)


def _measure(
    engine: Engine,
    facts: ModelFacts,
    options: BenchOptions,
    draw: Callable[[int], list[int]],
    *,
    tokens: int,
    depth: int | None,
) -> BenchResult:
    """Measure a prompt of `tokens`, or as many steps after `depth` tokens."""
    steps: list[float] = []
    speeds = []
    experts = CacheCounts()
    total = 0.0
    for repetition in range(options.repetitions + 1):
        engine.resume([0])  # back to the start: at least the last token is left to compute
        if depth is not None:
            engine.prefill(draw(max(depth, 1)))
        before = engine.expert_counts()
        engine.take_distinct_experts()
        given = draw(tokens)
        times = [_time(engine, given)] if depth is None else [_time(engine, [token]) for token in given]
        if repetition:  # the first only warms up
            experts += engine.expert_counts() - before
            total += sum(times)
            steps += times
            speeds.append(tokens / sum(times))
    read = None if depth is None else bytes_of_a_step(engine.plan, facts, depth + tokens // 2)
    return BenchResult(
        test="prompt" if depth is None else "decode",
        tokens=tokens,
        depth=depth or 0,
        tokens_per_s=tuple(speeds),
        median_tokens_per_s=median(speeds),
        step_s=None if depth is None else median(steps),
        bytes_per_token=read,
        bytes_per_s=None if read is None else read * median(speeds),
        distinct_experts=engine.take_distinct_experts(),
        hit_rate=experts.hit_rate,
        misses=experts.misses,
        filled_bytes=dict(experts.filled_bytes),
        filled_bytes_per_s=sum(experts.filled_bytes.values()) / total,
    )


def _time(engine: Engine, tokens: Sequence[int]) -> float:
    start = time.perf_counter()
    engine.prefill(tokens)
    return time.perf_counter() - start


def bytes_of_a_step(plan: AllocationPlan, facts: ModelFacts, position: int) -> int:
    """Return what one step at `position` reads from the device's memory: weights, its experts, and the KV cache."""
    lines = {line.id: line.bytes for line in plan.reservations}
    experts = sum(len(c.layers) * facts.top_k * c.slot_bytes for c in plan.experts.classes)
    return lines["dense"] + lines["head"] + experts + lines["kv_cache"] * position // plan.context
