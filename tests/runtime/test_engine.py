"""The engine follows its plan, answers as others do, and stops cleanly wherever it is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strata.doctor.plan import AllocationPlan, DeviceRef, Reservation, Tier
from strata.errors import AllocationFailed, PlanInfeasible, PlanMismatch, UnsupportedModel, UsageError
from strata.gguf.reader import GGUFFile, open_gguf
from strata.kernels.numpy_ops import NumpyOps
from strata.runtime.engine import Engine
from strata.runtime.generation import StopReason
from strata.runtime.runlog import RunLog
from tests.resident import FLOAT, GOLDEN
from tests.tiny_model import TinyModel

from .counted import CountedBlock
from .plans import planned

CARVED = {
    "dense",
    "head",
    "kv_cache",
    "workspace",
    "logits",
    "expert_slots",
    "embedding",
    "staging_ring",
    "experts_pageable",
}
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 96, 21)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(TinyModel(expert_type="Q8_0").write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def plan(file: GGUFFile) -> AllocationPlan:
    return planned(file, max_context=40, prefill=8, expert_cache=10)


@pytest.fixture
def engine(file: GGUFFile, plan: AllocationPlan) -> Iterator[Engine]:
    with Engine.load(file, plan) as engine:
        yield engine


def greedy(logits: np.ndarray, position: int) -> int:
    return int(logits.argmax())


@pytest.mark.parametrize("name", [*FLOAT, "qwen3moe-Q4_K", "qwen3moe-IQ3_S", "qwen3moe-MXFP4"])
@pytest.mark.parametrize("slots", [2, None], ids=["fewest slots", "planned slots"])
def test_golden_logits_by_a_real_plan(name: str, slots: int | None) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    tokens, expected = golden["tokens"].tolist(), golden["logits"]
    first = 40
    with (
        open_gguf(GOLDEN / f"{name}.gguf") as file,
        Engine.load(file, planned(file, max_context=len(tokens), prefill=16, expert_cache=slots)) as engine,
    ):
        found = [engine.prefill(tokens[:first]).copy()]
        found += [engine.decode(token).copy() for token in tokens[first:]]
        assert engine.left == 0
    for logits, reference in zip(found, expected[first - 1 :], strict=True):
        assert np.linalg.norm(logits - reference) < 1e-4 * np.linalg.norm(reference)


def stepped(file: GGUFFile, plan: AllocationPlan, count: int) -> list[int]:
    """Greedy tokens after the prompt, by prefill and decode alone."""
    with Engine.load(file, plan) as engine:
        tokens = [int(engine.prefill(PROMPT).argmax())]
        while len(tokens) < count:
            tokens.append(int(engine.decode(tokens[-1]).argmax()))
        return tokens


def test_a_generation_gives_the_tokens_and_its_figures(file: GGUFFile, plan: AllocationPlan, engine: Engine) -> None:
    chunks: list[tuple[int, int]] = []
    generation = engine.generate(PROMPT, greedy, max_tokens=6, progress=lambda *done: chunks.append(done))
    assert generation.stats.stop is None
    assert list(generation) == stepped(file, plan, 6)
    assert chunks == [(8, 21), (16, 21), (21, 21)]
    stats = generation.stats
    assert (stats.reused_tokens, stats.prefill_tokens, stats.generated_tokens, stats.decode_tokens) == (0, 21, 6, 5)
    assert stats.stop is StopReason.LENGTH
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert 0 < (stats.hit_rate or 0) < 1
    assert stats.evictions == stats.misses - plan.experts.slots
    assert stats.filled_bytes == {Tier.PAGEABLE: stats.misses * 3 * 64 * 32 // 32 * 34}  # all of them Q8_0


def test_the_next_turn_computes_only_what_is_new(engine: Engine) -> None:
    answer = list(engine.generate(PROMPT, greedy, max_tokens=4))
    turn = engine.generate([*PROMPT, *answer, 5, 6], greedy, max_tokens=1)
    list(turn)
    # The last token of the answer was given out, but never run.
    assert (turn.stats.reused_tokens, turn.stats.prefill_tokens) == (len(PROMPT) + 3, 3)


def test_stop_tokens_end_it_and_are_not_given_out(file: GGUFFile, plan: AllocationPlan, engine: Engine) -> None:
    tokens = stepped(file, plan, 6)
    stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    generation = engine.generate(PROMPT, greedy, max_tokens=6, stop_ids={tokens[stop]})
    assert list(generation) == tokens[:stop]
    assert generation.stats.stop is StopReason.STOP


def test_a_full_context_ends_it(engine: Engine) -> None:
    generation = engine.generate(PROMPT, greedy, max_tokens=1000)
    assert len(list(generation)) == 40 - len(PROMPT) + 1  # the last one needs no cell
    assert generation.stats.stop is StopReason.CONTEXT
    assert engine.left == 0
    again = engine.generate([*PROMPT, *range(40 - len(PROMPT))], greedy, max_tokens=9)
    assert len(list(again)) == 1
    assert again.stats.stop is StopReason.CONTEXT


def test_a_prompt_longer_than_the_context_is_refused_and_changes_nothing(engine: Engine) -> None:
    engine.prefill(PROMPT)
    with pytest.raises(UsageError, match="--max-context 42"):
        next(engine.generate([1] * 41, greedy, max_tokens=1))
    with pytest.raises(UsageError, match="no token"):
        next(engine.generate([], greedy, max_tokens=1))
    assert engine.position == len(PROMPT)


@pytest.mark.parametrize("nth", [1, 3, 4, 9, 10, 16, 24])  # of 3 layers x (3 chunks + 5 steps)
@pytest.mark.parametrize("op", ["attend", "expert_ffn", "combine"])
def test_ctrl_c_in_any_op_leaves_a_state_to_go_on_from(
    file: GGUFFile, plan: AllocationPlan, engine: Engine, op: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(NumpyOps, op), 0

    def interrupted(self: NumpyOps, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        original(self, *arguments)
        if calls == nth:
            raise KeyboardInterrupt

    monkeypatch.setattr(NumpyOps, op, interrupted)
    generation = engine.generate(PROMPT, greedy, max_tokens=6)
    given: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        given.extend(generation)
    stats = generation.stats
    assert stats.stop is StopReason.INTERRUPTED
    assert engine.position == stats.prefill_tokens + stats.decode_tokens
    assert stats.prefill_tokens in (0, 8, 16, 21)
    monkeypatch.undo()
    assert list(engine.generate(PROMPT, greedy, max_tokens=6)) == stepped(file, plan, 6)


def test_a_closed_generation_counts_as_interrupted(engine: Engine) -> None:
    generation = engine.generate(PROMPT, greedy, max_tokens=6)
    next(generation)
    generation.close()
    assert generation.stats.stop is StopReason.INTERRUPTED
    assert list(generation) == []


def test_every_refused_line_leaves_nothing_and_is_named(file: GGUFFile, plan: AllocationPlan) -> None:
    taken: list[str] = []
    with Engine.load(file, plan, take=lambda line: taken.append(line.id) or CountedBlock(line.bytes)):
        assert CountedBlock.alive == len(taken) == len(CARVED)
    assert CountedBlock.alive == 0
    for refused in taken:
        codes: dict[str, str] = {}

        def take(line: Reservation, refused: str = refused) -> CountedBlock:
            if line.id == refused:
                raise MemoryError
            return CountedBlock(line.bytes)

        def log(kind: str, codes: dict[str, str] = codes, **fields: str) -> None:
            if kind == "allocation":
                codes[fields["line"]] = fields["code"]

        with pytest.raises(AllocationFailed) as caught:
            Engine.load(file, plan, take=take, log=log)
        line = plan.line(refused)
        assert line is not None
        assert (caught.value.line, caught.value.nbytes) == (refused, line.bytes)
        assert codes[refused].startswith("MemoryError")
        assert all(code == "ok" for name, code in codes.items() if name != refused)
        assert CountedBlock.alive == 0


def test_memory_that_a_library_is_refused_is_named_too(
    file: GGUFFile, plan: AllocationPlan, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError("Unable to allocate 8.00 MiB")

    monkeypatch.setattr(NumpyOps, "route", refuse)
    with pytest.raises(AllocationFailed, match="Unable to allocate") as caught:
        engine.prefill(PROMPT)
    assert (caught.value.line, engine.position) == ("temporaries", 0)
    monkeypatch.setattr("strata.runtime.weights.dequantise", refuse)
    with pytest.raises(AllocationFailed) as caught:
        Engine.load(file, plan, take=lambda line: CountedBlock(line.bytes))
    assert caught.value.line == "temporaries"
    assert CountedBlock.alive == 0


def test_ctrl_c_while_loading_leaves_nothing(file: GGUFFile, plan: AllocationPlan) -> None:
    steps: list[tuple[int, int]] = []
    Engine.load(file, plan, progress=lambda *step: steps.append(step)).close()
    assert steps[0] == (0, steps[-1][1])
    assert steps[-1][0] == steps[-1][1] > 0
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    for nth in (1, 2, len(steps) // 2, len(steps)):
        seen = 0

        def interrupt(done: int, total: int, nth: int = nth) -> None:
            nonlocal seen
            seen += 1
            if seen == nth:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Engine.load(file, plan, progress=interrupt, take=lambda line: CountedBlock(line.bytes))
        assert CountedBlock.alive == 0


def test_plans_that_are_not_for_this_are_refused_before_anything_is_taken(
    file: GGUFFile, plan: AllocationPlan, tmp_path: Path
) -> None:
    replace = msgspec.structs.replace
    other = open_gguf(TinyModel(vocab=128).write(tmp_path / "other.gguf"))
    unknown = open_gguf(TinyModel(architecture="glm4moe").write(tmp_path / "glm4moe.gguf"))
    other_backend = replace(plan, device=DeviceRef(backend="rocm", id="GPU-1", name="Radeon RX 7900"))
    with pytest.raises(PlanMismatch, match="another header"):
        Engine.load(other, plan, take=never_take)
    with pytest.raises(PlanMismatch, match="RX 7900"):
        Engine.load(file, other_backend, take=never_take)
    with pytest.raises(UnsupportedModel, match="glm4moe"):
        Engine.load(unknown, planned(unknown), take=never_take)
    infeasible = planned(file, ram_budget_bytes=1 << 20)
    with pytest.raises(PlanInfeasible, match="are missing"):
        Engine.load(file, infeasible, take=never_take)


def never_take(line: Reservation) -> CountedBlock:
    pytest.fail(f"{line.id} was taken")


def test_the_log_tells_the_plan_each_allocation_and_the_figures_but_not_what_was_said(
    file: GGUFFile, plan: AllocationPlan, tmp_path: Path
) -> None:
    with RunLog(tmp_path, warn=pytest.fail) as log, Engine.load(file, plan, log=log.event) as engine:
        list(engine.generate(PROMPT, greedy, max_tokens=3))
        assert log.path is not None
    lines = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    assert [line["event"] for line in lines] == ["plan", *["allocation"] * len(CARVED), "loaded", "generation"]
    allocations = lines[1:-2]
    assert msgspec.convert(lines[0]["plan"], AllocationPlan) == plan
    assert {line["code"] for line in allocations} == {"ok"}
    assert [line["line"] for line in allocations] == [r.id for r in plan.reservations if r.id in CARVED]
    assert lines[-2]["memory"]["planned_bytes"] == sum(r.bytes for r in plan.reservations if r.tier is not Tier.FILE)
    figures = lines[-1]["stats"]
    assert figures["stop"] == "length"
    assert all(
        isinstance(value, int | float) for name, value in figures.items() if name not in ("stop", "filled_bytes")
    )
