"""Saved plans: round trip, readable refusals, and checks against the machine and model of the moment."""

import json
from pathlib import Path

import msgspec
import pytest

from strata.doctor.facts import CudaDevice, Facts
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.plan_io import check_saved, load_plan, save_plan
from strata.doctor.planner import make_plan
from strata.errors import PlanMismatch, UsageError
from tests.doctor.machines_with_gpus import gpu_machine
from tests.doctor.shapes import DENSE, GIB, MIB, Q3_30B, SMALL_MOE, machine

FACTS = machine(4 * GIB)


@pytest.fixture
def plan() -> AllocationPlan:
    return make_plan(FACTS, SMALL_MOE, PlanOptions(expert_cache=100))


def test_a_plan_comes_back_as_it_was_saved_and_still_holds(plan, tmp_path):
    file = tmp_path / "plan.json"
    save_plan(plan, file)
    assert load_plan(file) == plan
    assert check_saved(load_plan(file), FACTS, SMALL_MOE) == (plan, ())
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_cannot_be_saved_leaves_nothing_behind(plan, tmp_path):
    with pytest.raises(UsageError, match="folder"):
        save_plan(plan, tmp_path / "missing" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError):
        save_plan(plan, tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=99), "schema 99"),
        (lambda d: d.update(context="long"), r"context"),
        (lambda d: d["reservations"][1].update(tier="ram"), r"reservations"),
        (lambda d: d.pop("device"), "device"),
        (lambda d: d["budgets"][0].update(usable_bytes=10**400), "more than 64 bits"),
        (lambda d: d["shared"][0].update(reserve_bytes=-5), "reserve_bytes is -5, less than 0"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(plan, tmp_path, change, words):
    document = json.loads(msgspec.json.encode(plan))
    change(document)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    with pytest.raises(PlanMismatch, match=words):
        load_plan(file)


@pytest.mark.parametrize("text", ["", "no plan", "[1, 2]", "{}", " " * (17 << 20)])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    file = Path(tmp_path / "plan.json")
    file.write_text(text)
    with pytest.raises(PlanMismatch, match="no plan"):
        load_plan(file)


def test_a_missing_file_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_plan(tmp_path / "plan.json")


def test_another_model_is_refused(plan):
    with pytest.raises(PlanMismatch, match="headers differ"):
        check_saved(plan, FACTS, DENSE)


def test_memory_that_is_no_longer_there_is_refused_and_more_is_fine(plan):
    with pytest.raises(PlanMismatch, match="not free now"):
        check_saved(plan, machine(600 * MIB), SMALL_MOE)
    assert check_saved(plan, machine(40 * GIB), SMALL_MOE) == (plan, ())


def test_an_infeasible_plan_is_refused():
    plan = make_plan(machine(300 * MIB), SMALL_MOE, PlanOptions())
    with pytest.raises(PlanMismatch, match="does not fit"):
        check_saved(plan, FACTS, SMALL_MOE)


def edited(plan: AllocationPlan, line_id: str, **changes: object) -> AllocationPlan:
    lines = [msgspec.structs.replace(line, **changes) if line.id == line_id else line for line in plan.reservations]
    return msgspec.structs.replace(plan, reservations=tuple(lines))


def slot_class(plan: AllocationPlan, **changes: object) -> AllocationPlan:
    (only,) = plan.experts.classes
    experts = msgspec.structs.replace(plan.experts, classes=(msgspec.structs.replace(only, **changes),))
    return msgspec.structs.replace(plan, experts=experts)


def memory(plan: AllocationPlan, which: str, **changes: object) -> AllocationPlan:
    first, *more = getattr(plan, which)
    return msgspec.structs.replace(plan, **{which: (msgspec.structs.replace(first, **changes), *more)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: edited(p, "head", bytes=1000), '"head" needs .* 1,000 B'),
        (lambda p: edited(p, "head", bytes=-1), "has -1 bytes"),
        (lambda p: edited(p, "head", bytes=900 * GIB), "overfull"),
        (lambda p: memory(p, "budgets", reserve_bytes=-(1 << 62)), "of which -4611686018427387904 are kept free"),
        (lambda p: memory(p, "budgets", usable_bytes=-1), "RAM has -1 bytes"),
        (lambda p: memory(p, "shared", reserve_bytes=-1), "RAM has .* -1 are kept free"),
        (lambda p: edited(p, "head", id="tail"), '"head" needs .* no such line'),
        (
            lambda p: edited(p, "head", bytes=p.line("head").bytes - 1),
            r'"head" needs [0-9,]+ bytes of .* and the plan has 65,535,999\.',
        ),
        (
            lambda p: msgspec.structs.replace(
                p, reservations=(*p.reservations, msgspec.structs.replace(p.line("head"), id="bogus"))
            ),
            'nothing takes its line "bogus"',
        ),
        (lambda p: edited(p, "head", id="dense"), '"dense" occurs 2 times'),
        (lambda p: edited(p, "head", tier=Tier.PAGEABLE, device="host"), '"head" belongs into the tier "vram"'),
        (lambda p: msgspec.structs.replace(p, context=100_000), "kv_cache"),
        (lambda p: msgspec.structs.replace(p, chunk=4000), "workspace"),
        (lambda p: msgspec.structs.replace(p, threads=64), "context"),
        (lambda p: msgspec.structs.replace(p, threads=0), "0 threads cannot compute"),
        (lambda p: msgspec.structs.replace(p, threads=1 << 21), "2097152 threads cannot compute"),
        (lambda p: msgspec.structs.replace(p, threads=-1), "-1 threads cannot compute"),
        (lambda p: msgspec.structs.replace(p, kv="q8_0"), "cannot be q8_0"),
        (
            lambda p: msgspec.structs.replace(p, experts=msgspec.structs.replace(p.experts, total=385, file=1)),
            "385 experts, and the model has 384",
        ),
        (
            lambda p: msgspec.structs.replace(p, experts=msgspec.structs.replace(p.experts, slots=384)),
            '"expert_slots" needs',
        ),
        (lambda p: slot_class(p, slots=101), "shares its 100 expert slots out otherwise"),
        (lambda p: slot_class(p, layers=(0,)), "shares its 100 expert slots out otherwise"),
        (lambda p: slot_class(p, line="dense"), "shares its 100 expert slots out otherwise"),
        (
            lambda p: msgspec.structs.replace(p, experts=msgspec.structs.replace(p.experts, minimum_slots=1)),
            "its fewest expert slots are 1, and",
        ),
        (
            lambda p: msgspec.structs.replace(p, experts=msgspec.structs.replace(p.experts, file=1)),
            "are not 384 in all",
        ),
        (
            lambda p: msgspec.structs.replace(p, device=msgspec.structs.replace(p.device, id="GPU-1", backend="cuda")),
            "it is for",
        ),
    ],
)
def test_a_plan_edited_by_hand_is_checked_line_by_line(plan, edit, words):
    with pytest.raises(PlanMismatch, match=words):
        check_saved(edit(plan), FACTS, SMALL_MOE)


def test_another_version_is_only_a_note(plan):
    old = msgspec.structs.replace(plan, strata_version="0.0.1")
    followed, notes = check_saved(old, FACTS, SMALL_MOE)
    assert followed == old
    assert "0.0.1" in notes[0]


def with_context(nbytes: int, vram: int = 24 * GIB) -> Facts:
    cuda = CudaDevice(ordinal=0, uuid="GPU-0", context_bytes=nbytes, vram_free_bytes=vram - nbytes)
    return gpu_machine(vram_total=24 * GIB, vram_free=vram, ram=64 * GIB, cuda=cuda)


def test_a_context_that_has_grown_is_charged_as_it_is_now_while_there_is_room():
    options = PlanOptions(device="cuda", vram_budget_bytes=2 * GIB)
    plan = make_plan(with_context(300 * MIB), SMALL_MOE, options)
    followed, notes = check_saved(plan, with_context(500 * MIB), SMALL_MOE)
    assert followed.line("context").bytes == 500 * MIB
    assert not broken(followed)
    assert [line for line in followed.reservations if line.id != "context"] == [
        line for line in plan.reservations if line.id != "context"
    ]
    assert any("took 300 MiB when the plan was made, and 500 MiB now" in note for note in notes)
    assert check_saved(plan, with_context(200 * MIB), SMALL_MOE)[0] == plan  # a smaller one leaves more free


def test_a_context_that_has_grown_beyond_what_is_there_is_refused():
    plan = make_plan(with_context(300 * MIB, vram=12 * GIB), Q3_30B, PlanOptions(device="cuda"))
    with pytest.raises(PlanMismatch, match="VRAM that it needs are not free now"):
        check_saved(plan, with_context(500 * MIB, vram=12 * GIB), Q3_30B)
