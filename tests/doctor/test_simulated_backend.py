"""Plans for simulated machines: real sizes in a recorded machine's memories, all divided by one number."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest

from strata.doctor.cuda_budgets import cuda_limits
from strata.doctor.facts import Facts
from strata.doctor.facts_io import read_facts
from strata.doctor.gpus import choose_gpu
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.simulated_backend import SIMULATED, Shrink, proportionate_shrink
from strata.errors import StrataError, Undetermined
from strata.gguf.model_facts import ModelFacts, read_model_facts
from strata.gguf.reader import open_gguf
from tests.runtime.plans import machine

FIXTURES = Path(__file__).parents[2] / "fixtures"
MACHINES = sorted(path.stem for path in (FIXTURES / "machines").glob("*.json"))
SEED_2 = "seed-002-no-desktop"
MIB = 1 << 20
COUPLED = {"VRAM + locked", "commit limit"}


def facts_of(name: str) -> Facts:
    return read_facts(FIXTURES / "machines" / f"{name}.json")


@cache
def model() -> ModelFacts:
    return read_model_facts(open_gguf(FIXTURES / "golden" / "qwen3moe-Q8_0.gguf"))


def plan_on(facts: Facts, **options: object) -> AllocationPlan:
    shrink, _ = proportionate_shrink(facts, model(), PlanOptions(), None)
    return make_plan(facts, model(), PlanOptions(**{"device": SIMULATED, "shrink": shrink, **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MACHINES)
def test_every_recorded_machine_is_planned_for_or_refused_in_words(name: str) -> None:
    try:
        plan = plan_on(facts_of(name))
    except StrataError as error:
        words = error.remedy
    else:
        check(plan)
        words = plan.notes[-1]
    assert words


def check(plan: AllocationPlan) -> None:
    assert plan.device.backend == SIMULATED
    assert plan.expected is None
    if plan.feasible:
        assert broken(plan) == ()
    else:
        assert plan.shortfall
        assert plan.changes


def test_lines_hold_what_the_cpu_takes_where_a_gpu_machine_puts_it() -> None:
    plan = plan_on(facts_of(SEED_2), prefill=8)
    chosen = PlanOptions(prefill=8, expert_cache=plan.experts.slots)
    plain = make_plan(machine(threads=2), model(), chosen)
    for line in ("dense", "head", "kv_cache", "workspace", "logits", "expert_slots", "embedding", "staging_ring"):
        here, there = plan.line(line), plain.line(line)
        assert here is not None
        assert there is not None
        assert here.bytes == there.bytes
    assert {line.id: line.tier for line in plan.reservations} == {
        "context": Tier.VRAM,
        "dense": Tier.VRAM,
        "head": Tier.VRAM,
        "kv_cache": Tier.VRAM,
        "workspace": Tier.VRAM,
        "logits": Tier.VRAM,
        "expert_slots": Tier.VRAM,
        "process": Tier.PAGEABLE,
        "temporaries": Tier.PAGEABLE,
        "embedding": Tier.PINNED,
        "staging_ring": Tier.PINNED,
        "experts_pinned": Tier.PINNED,
    }


def test_budgets_are_the_recorded_ones_divided() -> None:
    facts = facts_of(SEED_2)
    plan = plan_on(facts)
    recorded = cuda_limits(facts, choose_gpu(facts, None), PlanOptions())
    small = Shrink.of(plan.options)
    assert [b.usable_bytes for b in plan.budgets] == [small.down(b.usable_bytes) for b in recorded.budgets]
    assert [s.usable_bytes for s in plan.shared] == [small.down(s.usable_bytes) for s in recorded.shared]
    assert {s.name for s in plan.shared} > COUPLED
    assert any("divided by" in note for note in plan.notes)


@pytest.mark.parametrize(("option", "tier"), [("vram_budget_bytes", Tier.VRAM), ("pinned_budget_bytes", Tier.PINNED)])
def test_memory_options_speak_of_the_small_machine_to_the_byte(option: str, tier: Tier) -> None:
    for asked in (5 * MIB, 7 * MIB + 1, 123_457):
        plan = plan_on(facts_of(SEED_2), **{option: asked})
        assert next(b.usable_bytes for b in plan.budgets if b.tier is tier) == asked


def test_a_ram_budget_and_a_reserve_do_too() -> None:
    plan = plan_on(facts_of(SEED_2), ram_budget_bytes=9 * MIB, vram_reserve_bytes=MIB)
    ram = next(s for s in plan.shared if s.name == "RAM")
    assert ram.usable_bytes - ram.reserve_bytes == 9 * MIB
    assert plan.budgets[0].reserve_bytes == MIB


def test_the_share_of_experts_in_vram_is_the_report_s() -> None:
    """7.23 GiB of slots in a model of 51.1 GiB, and 7,671 slots of 24,576 on the larger card."""
    for name, most, least in ((SEED_2, 0.40, 0.10), ("seed-000-budget-exhausted", 0.50, 0.20)):
        facts = facts_of(name)
        shrink, sentence = proportionate_shrink(facts, model(), PlanOptions(), 54868207206)
        assert "51.1 GiB" in sentence
        plan = make_plan(facts, model(), PlanOptions(device=SIMULATED, shrink=shrink))
        assert least < plan.experts.slots / plan.experts.total <= most


def test_the_machine_stays_the_same_whatever_the_options() -> None:
    facts = facts_of(SEED_2)
    first = proportionate_shrink(facts, model(), PlanOptions(), None)
    other = PlanOptions(max_context=8, kv="f16", vram_budget_bytes=MIB, prefill=1)
    assert proportionate_shrink(facts, model(), other, None) == first


def test_a_machine_without_a_gpu_cannot_be_simulated() -> None:
    with pytest.raises(Undetermined, match="NVIDIA GPU"):
        proportionate_shrink(machine(), model(), PlanOptions(), None)


def test_the_same_question_has_the_same_answer_to_the_byte() -> None:
    one, two = (msgspec.json.encode(plan_on(facts_of(SEED_2))) for _ in range(2))
    assert one == two
