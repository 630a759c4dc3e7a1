"""Which backend a run takes, and what it plans with after a refusal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from strata.cli.loading import _with_what_was_granted, plan_to_run
from strata.cli.preflight import OpenModel
from strata.doctor.facts_io import read_facts
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.errors import AllocationFailed
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.runtime.memory import MemoryRefused
from tests.tiny_model import TinyModel

H200 = read_facts(Path(__file__).parents[2] / "fixtures" / "machines" / "h200-measured.json")
FREE = 100 << 20


def opened(folder: Path, **types: str) -> OpenModel:
    file = open_gguf(TinyModel(**types).write(folder / "tiny.gguf"))
    return OpenModel(file, read_model_facts(file))


def test_a_model_without_kernels_runs_on_the_cpu_and_says_why(tmp_path: Path) -> None:
    plan, notes = plan_to_run(opened(tmp_path, expert_type="Q5_0"), H200, PlanOptions())
    assert plan.device.backend == "numpy"
    assert "Q5_0" in notes[0]
    asked, notes = plan_to_run(opened(tmp_path, expert_type="Q5_0"), H200, PlanOptions(device="cuda"))
    assert asked.device.backend == "cuda"  # as it was asked for: loading refuses it by name


def test_what_does_not_fit_into_a_full_card_runs_on_the_cpu_unless_the_card_was_chosen(tmp_path: Path) -> None:
    driver = H200.nvml.value
    assert driver is not None
    full = msgspec.structs.replace(driver.gpus[0], vram_free_bytes=700 << 20)
    nvml = msgspec.structs.replace(H200.nvml, value=msgspec.structs.replace(driver, gpus=(full,)))
    facts = msgspec.structs.replace(H200, nvml=nvml)
    model = opened(tmp_path)
    plan, notes = plan_to_run(model, facts, PlanOptions())
    assert (plan.device.backend, plan.feasible) == ("numpy", True)
    assert "are missing" in notes[0]
    for chosen in ({"device": "cuda"}, {"vram_budget_bytes": 600 << 20}, {"gpu": "0"}):
        plan, notes = plan_to_run(model, facts, PlanOptions(**chosen))
        assert (plan.device.backend, plan.feasible, notes) == ("cuda", False, ())


def test_a_model_with_kernels_runs_on_the_gpu(tmp_path: Path) -> None:
    plan, notes = plan_to_run(opened(tmp_path), H200, PlanOptions())
    assert (plan.device.backend, notes) == ("cuda", ())


def refused(plan: AllocationPlan, line: str, options: PlanOptions) -> PlanOptions:
    """The options after a driver refused a line with `FREE` bytes free."""
    try:
        try:
            raise MemoryRefused("cudaMalloc", 2, "cudaErrorMemoryAllocation", "out of memory", free_bytes=FREE)
        except MemoryRefused as cause:
            raise AllocationFailed("take it", "no", "", line=line, nbytes=1) from cause
    except AllocationFailed as refusal:
        return _with_what_was_granted(plan, options, refusal)[0]


@pytest.mark.parametrize("line", ["kv_cache", "expert_slots", "host_io", "staging_ring"])
def test_after_a_refusal_no_more_is_planned_than_was_granted(line: str, tmp_path: Path) -> None:
    options = PlanOptions(device="auto")
    model = opened(tmp_path)
    plan = make_plan(H200, model.facts, options)
    again = refused(plan, line, options)
    assert again.device == "cuda"  # what was promised is not changed to the CPU in passing
    tier = Tier.PINNED if line in ("host_io", "staging_ring") else Tier.VRAM
    lines = [each for each in plan.reservations if each.tier is tier]
    before = sum(each.bytes for each in lines[: [each.id for each in lines].index(line)])
    changed = {name for name in msgspec.structs.asdict(again) if getattr(again, name) != getattr(options, name)}
    if tier is Tier.VRAM:
        assert again.vram_budget_bytes == before + FREE
        assert changed == {"device", "vram_budget_bytes"}
    else:
        assert again.pinned_budget_bytes == before
        assert changed == {"device", "pinned_budget_bytes"}
        assert make_plan(H200, model.facts, again).planned_bytes(Tier.PINNED) <= before
