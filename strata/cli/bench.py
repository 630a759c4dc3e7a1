"""`strata bench`: load a model by its plan, measure prompts and steps, and print a table that can be pasted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from strata.cli.fetch import PlannedRun, open_to_run, plan_run
from strata.cli.loading import load, show_plan
from strata.cli.output import emit_json, out, warn
from strata.cli.preflight import OpenModel, require_feasible
from strata.cli.progress import steps
from strata.errors import UsageError

if TYPE_CHECKING:
    from strata.doctor.facts import Facts
    from strata.doctor.plan import AllocationPlan, PlanOptions
    from strata.doctor.speed import Range
    from strata.gguf.model_facts import ModelFacts
    from strata.runtime.bench import BenchResult
    from strata.runtime.engine import Engine

_COLUMNS = ("device", "experts ready", "test", "tok/s, median", "expected", "of", "read", "of memory", "hits", "filled")


@dataclass(frozen=True)
class BenchRequest:
    """The command line of `strata bench`, but for what the planner reads."""

    model: str
    prompts: str
    tokens: int
    depths: str
    repetitions: int
    seed: int
    json: bool


def bench_model(request: BenchRequest, options: PlanOptions) -> None:
    """Carry out `strata bench`."""
    from strata.cli.overhead import overhead_noted
    from strata.runtime.bench import BenchOptions, run_bench
    from strata.runtime.models import load_config
    from strata.runtime.runlog import RunLog, log_folder

    bench = BenchOptions(
        prompts=_lengths("--prompts", request.prompts, least=1),
        tokens=request.tokens,
        depths=_lengths("--depths", request.depths, least=0),
        repetitions=request.repetitions,
        seed=request.seed,
    )
    if options.max_context is None:
        options = msgspec.structs.replace(options, max_context=bench.context)

    def plan_it(model: OpenModel, log: RunLog | None = None) -> PlannedRun:
        load_config(model.file)
        return plan_run(model, options, log)

    model = open_to_run(request.model, plan_it, quiet=request.json)
    with model.file, RunLog(log_folder(), warn=warn) as log:
        planned = plan_it(model, log)
        facts, plan = planned.facts, planned.plan
        for note in planned.notes:
            warn(note)
        if not request.json:
            show_plan(plan)
        require_feasible(plan)
        _check_lengths(bench.context, plan.context)
        loaded = load(model, plan, options, log, quiet=request.json)
        with loaded as engine, overhead_noted(engine, facts), steps() as progress:
            results = run_bench(engine, model.facts, bench, lambda what: progress(what, None, None))
            ranges = tuple(expected_of_result(facts, model.facts, engine.plan, result) for result in results)
            document = _document(engine, results, ranges, facts, bench.seed)
            log.event("bench", **{key: document[key] for key in ("results", "memory", "loading")})
    if request.json:
        emit_json(document)
    else:
        table = markdown(engine.plan, results, ranges, document["memory_bytes_per_s"])
        out().print(table, soft_wrap=True, markup=False)


def _lengths(option: str, text: str, *, least: int) -> tuple[int, ...]:
    """Read numbers of tokens with commas between them; nothing is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise UsageError(f"{option} {text}", f"it takes numbers from {least}, with commas", f"E.g. {option} 128,512")
    return tuple(int(word) for word in words)


def _check_lengths(needed: int, context: int) -> None:
    if needed > context:
        raise UsageError(
            f"measure {needed:,} tokens",
            f"the context is {context:,} tokens (--max-context)",
            f"Use --max-context {needed} or more, or shorter --prompts, --depths and --tokens",
        )


def expected_of_result(facts: Facts, model: ModelFacts, plan: AllocationPlan, result: BenchResult) -> Range:
    """Return the range in which a measurement's speed should lie by the plan's arithmetic, with the misses it had."""
    from strata.doctor.expectation import Turn, expected_of_turn

    misses = round(result.misses / len(result.tokens_per_s))
    prompt = result.test == "prompt"
    turn = Turn(
        start=result.depth,
        prompt=result.tokens if prompt else 0,
        answer=0 if prompt else result.tokens,
        prefill_misses=misses if prompt else 0,
        decode_misses=0 if prompt else misses,
    )
    decode, prefill = expected_of_turn(facts, model, plan, turn)
    return prefill if prompt else decode


def is_inside(result: BenchResult, expected: Range) -> bool:
    """Say whether a measurement's median lies in the range that was expected."""
    slow, fast = expected
    return slow <= result.median_tokens_per_s <= fast


def _document(
    engine: Engine, results: tuple[BenchResult, ...], ranges: tuple[Range, ...], facts: Facts, seed: int
) -> dict[str, Any]:
    from strata.doctor.versions import versions

    plan = engine.plan
    return {
        "schema_version": 1,
        "versions": versions(),
        "model": plan.model,
        "device": plan.device,
        "seed": seed,
        "experts": plan.experts,
        "context": plan.context,
        "kv": plan.kv,
        "chunk": plan.chunk,
        "threads": plan.threads,
        "memory_bytes_per_s": _memory_speed(facts, plan),
        "link_bytes_per_s": facts.speed.value.h2d_pinned_bytes_per_s if facts.speed.value else None,
        "loading": engine.loading,
        "results": [
            {
                **msgspec.structs.asdict(result),
                "expected_tokens_per_s": expected,
                "inside_expected": is_inside(result, expected),
            }
            for result, expected in zip(results, ranges, strict=True)
        ],
        "memory": engine.memory_report(),
    }


def _memory_speed(facts: Facts, plan: AllocationPlan) -> float | None:
    """Return the measured read speed of the memory that computes, or None where nothing was measured."""
    speed = facts.speed.value
    if speed is None:
        return None
    if plan.device.backend == "cuda":
        copied = speed.device_copy_bytes_per_s
        return 2 * copied if copied else None  # a copied byte is read and written
    return max(speed.ram_read_bytes_per_s.values(), default=None)


def markdown(
    plan: AllocationPlan,
    results: tuple[BenchResult, ...],
    ranges: tuple[Range, ...],
    memory_speed: float | None,
) -> str:
    """Return results as the rows of a Markdown table, under one line that names the model."""
    from strata.cli.promise import range_text

    ready = f"{plan.experts.slots:,} of {plan.experts.total:,}" if plan.experts.total else "dense"
    rows = [f"{plan.model.name}, KV {plan.kv}, context {plan.context:,}:", ""]
    rows += [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    for result, expected in zip(results, ranges, strict=True):
        low, high = min(result.tokens_per_s), max(result.tokens_per_s)
        read = result.bytes_per_s
        filled = sum(result.filled_bytes.values())
        rows.append(
            _row(
                (
                    plan.device.name,
                    ready,
                    f"{result.test} {result.tokens:,}" + (f" at {result.depth:,}" if result.test == "decode" else ""),
                    f"{result.median_tokens_per_s:,.1f} ({low:,.1f} to {high:,.1f})",
                    f"{range_text(expected)}{'' if is_inside(result, expected) else ', OUTSIDE'}",
                    str(len(result.tokens_per_s)),
                    f"{read / 1e9:,.0f} GB/s" if read else "",
                    f"{read / memory_speed:.0%}" if read and memory_speed else "",
                    "" if result.hit_rate is None else f"{result.hit_rate:.1%}",
                    f"{result.filled_bytes_per_s / 1e9:,.1f} GB/s" if filled else "",
                )
            )
        )
    return "\n".join(rows)


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
