"""The one re-plan: what a memory refused decides the second plan, and nothing is left when that is refused, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.cli import ram_replan
from strata.cli.loading import load
from strata.cli.preflight import OpenModel, open_model
from strata.cli.ram_replan import require_context
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.plan_io import load_plan, save_plan
from strata.doctor.planner import make_plan
from strata.errors import AllocationFailed, PlanInfeasible
from strata.runtime import memory, process_memory
from strata.runtime.runlog import RunLog
from tests.cli.runner import MODEL
from tests.doctor.machines_with_gpus import gpu_machine
from tests.doctor.shapes import SMALL_MOE
from tests.runtime.counted import CountedBlock
from tests.runtime.plans import machine, planned

MIB = 1 << 20


@dataclass
class Refusing:
    """Plays an operating system that grants `limit` bytes, and `then` after it has refused once."""

    limit: int = 1 << 40
    then: int | None = None

    def take(self, nbytes: int) -> CountedBlock:
        if CountedBlock.alive_bytes + nbytes > self.limit:
            self.limit = self.limit if self.then is None else self.then
            raise MemoryError("this much is not there")
        return CountedBlock(nbytes)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    system = Refusing()
    monkeypatch.setattr(CountedBlock, "alive", 0)
    monkeypatch.setattr(CountedBlock, "alive_bytes", 0)
    monkeypatch.setattr(memory, "HostBlock", system.take)
    monkeypatch.setattr(ram_replan, "take_facts", lambda path, options: machine())
    monkeypatch.setattr(process_memory, "mappable_bytes", lambda most: 0)
    return system


@pytest.fixture
def model() -> Iterator[OpenModel]:
    opened = open_model(MODEL)
    with opened.file:
        yield opened


def ram(plan: AllocationPlan) -> int:
    return sum(line.bytes for line in plan.reservations if line.tier is not Tier.FILE)


def before(plan: AllocationPlan, line: str) -> int:
    """Bytes that the allocator takes ahead of a line."""
    ids = [each.id for each in plan.reservations]
    ahead = plan.reservations[: ids.index(line)]
    return sum(each.bytes for each in ahead if each.id not in ("context", "temporaries"))


def load_logged(model: OpenModel, plan: AllocationPlan, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    with RunLog(folder, warn=print) as log:
        engine = load(model, plan, plan.options, log, quiet=True)
        assert log.path
        return engine, [json.loads(line) for line in log.path.read_text().splitlines()]


def test_a_refused_line_leads_to_a_smaller_plan_that_is_said_aloud(
    model: OpenModel, system: Refusing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = planned(model.file)
    slots = first.line("expert_slots")
    assert slots
    system.limit = before(first, "expert_slots") + slots.bytes // 2
    engine, events = load_logged(model, first, tmp_path)
    with engine:
        assert ram(engine.plan) < ram(first)
        assert engine.plan.context == first.context
        assert engine.prefill([1, 2, 3]).any()
    assert CountedBlock.alive == 0
    said = capsys.readouterr().err
    assert '"expert_slots"' in said
    assert "Planning once more" in said
    assert [event["refused"] for event in events if event["event"] == "replan"] == ["expert_slots"]


def test_what_the_system_would_still_grant_counts_beside_the_whole_lines(
    model: OpenModel, system: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(model.file)
    system.limit = before(first, "expert_slots")
    refusal = AllocationFailed("a", "b", "c", line="expert_slots", nbytes=1)
    whole_lines = ram_replan._granted_bytes(first, refusal)
    monkeypatch.setattr(process_memory, "mappable_bytes", lambda most: 4096 * MIB)
    everything = ram_replan._granted_bytes(first, refusal)
    assert whole_lines <= ram(first) - MIB == everything  # and less than what was refused, whatever is granted
    for_temporaries = AllocationFailed("a", "b", "c", line="temporaries", nbytes=1)
    temporaries = first.line("temporaries")
    assert temporaries
    assert (
        sum(line.bytes for line in ram_replan._granted_lines(first, for_temporaries)) == ram(first) - temporaries.bytes
    )


def test_a_second_refusal_is_the_end_and_leaves_nothing(model: OpenModel, system: Refusing, tmp_path: Path) -> None:
    first = planned(model.file)
    system.limit, system.then = before(first, "expert_slots"), before(first, "head")
    with pytest.raises(AllocationFailed, match='"head"'):
        load_logged(model, first, tmp_path)
    assert CountedBlock.alive == 0


def test_too_little_for_any_plan_names_the_line_and_what_is_missing(
    model: OpenModel, system: Refusing, tmp_path: Path
) -> None:
    first = planned(model.file, max_context=2048)
    system.limit = before(first, "kv_cache")
    with pytest.raises(PlanInfeasible) as refusal:
        load_logged(model, first, tmp_path)
    assert '"kv_cache"' in refusal.value.asked
    assert "MiB are granted in all" in refusal.value.found
    assert "are missing" in refusal.value.remedy
    assert "--ram-budget" not in refusal.value.remedy  # the system refused: a larger budget is no way out
    assert CountedBlock.alive == 0


def test_a_saved_plan_is_planned_again_with_its_own_context_and_budget(
    model: OpenModel, system: Refusing, tmp_path: Path
) -> None:
    made = planned(model.file, max_context=320, kv="f16", ram_budget_bytes=1024 * MIB)
    save_plan(made, tmp_path / "plan.json")
    first = load_plan(tmp_path / "plan.json")
    slots = first.line("expert_slots")
    assert slots
    system.limit = before(first, "expert_slots") + slots.bytes // 2
    engine, _ = load_logged(model, first, tmp_path)
    with engine:
        assert (engine.plan.context, engine.plan.kv) == (320, "f16")
        assert ram(engine.plan) <= (engine.plan.options.ram_budget_bytes or 0) < ram(first)
    assert CountedBlock.alive == 0


def test_an_explicit_budget_is_never_exceeded(model: OpenModel, system: Refusing) -> None:
    first = planned(model.file)
    tight = msgspec.structs.replace(first, options=msgspec.structs.replace(first.options, ram_budget_bytes=3 * MIB))
    refusal = AllocationFailed("a", "b", "c", line="expert_slots", nbytes=1)
    assert ram_replan._granted_bytes(tight, refusal) == 3 * MIB


GPU = gpu_machine(vram_total=24 << 30, vram_free=20 << 30, ram=32 << 30)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (make_plan(machine(), SMALL_MOE, PlanOptions(device="cpu")), "context"),
        (make_plan(GPU, SMALL_MOE, PlanOptions(device="cuda")), "process"),
    ],
)
def test_what_libraries_take_is_asked_for_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, plan: AllocationPlan, line: str
) -> None:
    monkeypatch.setattr(process_memory, "mappable_bytes", lambda most: 0)
    monkeypatch.setattr(process_memory, "anonymous_bytes", lambda: 20 * MIB)
    with pytest.raises(AllocationFailed, match=f'"{line}"') as refused:
        require_context(plan)
    assert refused.value.line == line
    monkeypatch.setattr(process_memory, "mappable_bytes", lambda most: most)
    require_context(plan)
    monkeypatch.setattr(process_memory, "mappable_bytes", lambda most: 0)
    monkeypatch.setattr(process_memory, "anonymous_bytes", lambda: 4 << 30)
    require_context(plan)  # it has them already
