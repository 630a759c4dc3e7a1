"""Plans for the numpy backend: lines, choices, refusals and the changes they offer."""

import re
from random import Random

import msgspec
import pytest

from strata.doctor.candidates import candidates
from strata.doctor.invariants import broken
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import Problem, make_plan
from strata.doctor.speed import turn_seconds
from strata.errors import Undetermined, UsageError
from tests.doctor.questions import random_question
from tests.doctor.shapes import DENSE, GIB, MIB, MIXTRAL, Q3_30B, SMALL_MOE, machine, model
from tests.doctor.typed import applied, weaker

KV_PER_TOKEN_30B = 48 * 4 * (128 + 128) * 4  # float32


def test_all_experts_get_slots_where_ram_allows_and_nothing_is_kept_twice():
    plan = make_plan(machine(192 * GIB), Q3_30B, PlanOptions())
    assert plan.feasible
    assert plan.experts.slots == plan.experts.total == 48 * 128
    assert plan.experts.file == plan.experts.total
    assert plan.line("experts_pageable") is None
    assert plan.line("expert_slots").bytes == 6144 * 3 * 2048 * 768 * 4
    assert plan.line("kv_cache").bytes == pytest.approx(4096 * KV_PER_TOKEN_30B, rel=1e-4)
    assert plan.line("head").bytes == 2048 * 151_936 * 4
    assert plan.chunk == 512


def test_short_ram_is_shared_between_slots_and_experts_as_stored():
    plan = make_plan(machine(48 * GIB, disk_bytes_per_s=5e6), Q3_30B, PlanOptions())
    assert plan.feasible
    assert plan.experts.minimum_slots < plan.experts.slots < plan.experts.total
    assert plan.experts.pageable > 0
    taken = sum(plan.planned_bytes(tier) for tier in (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE))
    slot = plan.experts.slot_bytes
    assert (
        plan.shared[0].usable_bytes - plan.shared[0].reserve_bytes - taken < slot
    )  # nothing worth a slot is left over
    assert any("of 6,144 experts have a slot" in sentence for sentence in plan.fallbacks)


def test_experts_stay_in_the_file_where_reading_them_is_quick_beside_making_them_ready():
    plan = make_plan(machine(48 * GIB, disk_bytes_per_s=2e9), Q3_30B, PlanOptions())
    assert plan.experts.pageable == 0
    assert any("6,144 in the model file" in sentence for sentence in plan.fallbacks)


def test_a_dense_model_has_no_expert_lines():
    plan = make_plan(machine(8 * GIB), DENSE, PlanOptions())
    assert plan.feasible
    assert plan.experts.total == plan.experts.slots == 0
    assert not [line.id for line in plan.reservations if line.id.startswith(("expert", "staging"))]


def test_lines_come_device_first_and_have_unique_ids():
    plan = make_plan(machine(24 * GIB), SMALL_MOE, PlanOptions(pinned_budget_bytes=8 * MIB))
    tiers = [line.tier for line in plan.reservations]
    assert tiers == sorted(tiers, key=[Tier.VRAM, Tier.PAGEABLE, Tier.PINNED, Tier.FILE].index)
    assert not broken(plan)


def test_options_are_honoured_exactly():
    options = PlanOptions(
        max_context=1000, expert_cache=7, prefill=33, kv="f16", ram_budget_bytes=2 * GIB, pinned_budget_bytes=10 * MIB
    )
    plan = make_plan(machine(24 * GIB, disk_bytes_per_s=1e6), SMALL_MOE, options)
    assert (plan.context, plan.experts.slots, plan.chunk, plan.kv) == (1000, 7, 33, "f16")
    assert sum(r.bytes for r in plan.reservations if r.tier is not Tier.FILE) <= 2 * GIB
    assert 0 < plan.planned_bytes(Tier.PINNED) <= 10 * MIB


def test_vram_budget_caps_everything_that_plays_the_device():
    plan = make_plan(machine(24 * GIB, disk_bytes_per_s=1e6), SMALL_MOE, PlanOptions(vram_budget_bytes=600 * MIB))
    assert plan.feasible
    assert plan.planned_bytes(Tier.VRAM) <= 600 * MIB
    assert plan.experts.slots < plan.experts.total
    assert plan.experts.pageable == plan.experts.total  # the rest of RAM is free to hold them


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PlanOptions(max_context=0), "no token"),
        (PlanOptions(max_context=40_961), "made for at most 40,960"),
        (PlanOptions(prefill=0), "at least one"),
        (PlanOptions(prefill=5000), "only 4,096"),
        (PlanOptions(expert_cache=7), "one token needs 8"),
        (PlanOptions(expert_cache=6145), "6,144 experts in all"),
        (PlanOptions(kv="int8"), "f32 or f16"),
        (PlanOptions(vram_reserve_bytes=MIB), "has none"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(options, words):
    with pytest.raises(UsageError, match=words):
        make_plan(machine(192 * GIB), Q3_30B, options)


def test_expert_cache_for_a_dense_model_is_a_usage_error():
    with pytest.raises(UsageError, match="dense model"):
        make_plan(machine(8 * GIB), DENSE, PlanOptions(expert_cache=4))


def test_the_default_context_is_said_and_the_models_own_when_shorter():
    plan = make_plan(machine(192 * GIB), Q3_30B, PlanOptions())
    assert plan.context == 4096
    assert any("4,096" in note and "40,960" in note for note in plan.notes)
    short = msgspec.structs.replace(Q3_30B, context_length=2048)
    assert make_plan(machine(192 * GIB), short, PlanOptions()).context == 2048


def test_a_container_limit_counts_as_much_as_available_ram():
    limited = machine(64 * GIB, cgroup_limit_bytes=6 * GIB, cgroup_used_bytes=2 * GIB, cgroup_reclaimable_bytes=1 * GIB)
    plan = make_plan(limited, SMALL_MOE, PlanOptions())
    assert plan.shared[0].usable_bytes == 5 * GIB
    assert "container" in plan.shared[0].formula


def test_a_limit_on_address_space_bounds_what_the_process_takes_and_needs_no_reserve_of_its_own():
    free = make_plan(machine(64 * GIB), SMALL_MOE, PlanOptions()).shared[0]
    limited = machine(64 * GIB, address_space_limit_bytes=5 * GIB, address_space_used_bytes=1 * GIB)
    plan = make_plan(limited, SMALL_MOE, PlanOptions())
    (ram,) = plan.shared
    assert ram.usable_bytes == free.usable_bytes
    assert ram.usable_bytes - ram.reserve_bytes == 4 * GIB
    assert ram.formula.endswith(", at most 4 GiB for this process (ulimit -v)")
    assert "The address space of this process is limited to 5 GiB (ulimit -v), of which 1 GiB are in use." in plan.notes
    wide = machine(64 * GIB, address_space_limit_bytes=500 * GIB, address_space_used_bytes=1 * GIB)
    assert make_plan(wide, SMALL_MOE, PlanOptions()).shared[0] == free


def test_a_limit_on_address_space_whose_use_is_unknown_says_so():
    plan = make_plan(machine(64 * GIB, address_space_limit_bytes=5 * GIB), SMALL_MOE, PlanOptions())
    assert any("what is in use of it is unknown" in note for note in plan.notes)


def test_where_only_the_limit_on_address_space_is_too_small_it_is_what_has_to_change():
    plan = make_plan(machine(64 * GIB, address_space_limit_bytes=64 * MIB), SMALL_MOE, PlanOptions())
    assert not plan.feasible
    (change,) = plan.changes
    more = int(re.search(r"by ([\d,]+) MiB or more: ulimit -v unlimited", change.sentence)[1].replace(",", ""))
    for mib, fits in ((more, True), (more - 1, False)):
        raised = machine(64 * GIB, address_space_limit_bytes=(64 + mib) * MIB)
        assert make_plan(raised, SMALL_MOE, PlanOptions()).feasible is fits


def test_unknown_ram_is_not_zero_but_undetermined_unless_a_budget_is_given():
    with pytest.raises(Undetermined, match="meminfo is missing") as caught:
        make_plan(machine(None), SMALL_MOE, PlanOptions())
    assert "--ram-budget" in caught.value.remedy
    plan = make_plan(machine(None), SMALL_MOE, PlanOptions(ram_budget_bytes=4 * GIB))
    assert plan.feasible
    assert any("not verified" in note for note in plan.notes)


def test_a_limit_whose_use_is_unknown_is_undetermined():
    with pytest.raises(Undetermined, match="use could not be read"):
        make_plan(machine(8 * GIB, cgroup_limit_bytes=GIB), SMALL_MOE, PlanOptions())


def test_a_shortfall_names_the_first_line_and_all_missing_bytes():
    facts = machine(2 * GIB)
    plan = make_plan(facts, Q3_30B, PlanOptions())
    assert not plan.feasible
    assert plan.shortfall.line == "dense"
    needed = sum(r.bytes for r in plan.reservations if r.tier is not Tier.FILE)
    usable = plan.shared[0].usable_bytes - plan.shared[0].reserve_bytes
    assert plan.shortfall.missing_bytes == needed - usable
    assert plan.expected is None


@pytest.mark.parametrize(
    ("facts", "model", "options", "first"),
    [
        (
            machine(24 * GIB),
            SMALL_MOE,
            PlanOptions(ram_budget_bytes=200 * MIB),
            "--ram-budget",
        ),
        (
            machine(24 * GIB),
            SMALL_MOE,
            PlanOptions(vram_budget_bytes=200 * MIB),
            "--vram-budget",
        ),
        (
            machine(850 * MIB),
            SMALL_MOE,
            PlanOptions(prefill=8192, max_context=8192, kv="f16"),
            "--prefill",
        ),
        (
            machine(900 * MIB),
            SMALL_MOE,
            PlanOptions(expert_cache=384),
            "--expert-cache",
        ),
        (
            machine(744 * MIB),
            SMALL_MOE,
            PlanOptions(max_context=16_384, kv="f16"),
            "--max-context",
        ),
    ],
)
def test_the_smallest_change_works_and_the_next_weaker_does_not(facts, model, options, first):
    plan = make_plan(facts, model, options)
    assert not plan.feasible
    assert plan.changes[0].option.startswith(first + " ")
    for change in plan.changes:
        assert make_plan(facts, model, applied(options, change.option)).feasible, change
    assert not make_plan(facts, model, weaker(options, plan.changes[0].option)).feasible


def test_changes_come_in_the_order_of_what_they_cost_the_context_last():
    plan = make_plan(
        machine(24 * GIB),
        SMALL_MOE,
        PlanOptions(ram_budget_bytes=644 * MIB, max_context=16_384, prefill=512, expert_cache=64, kv="f32"),
    )
    assert [change.option.split()[0] for change in plan.changes] == [
        "--ram-budget",
        "--prefill",
        "--expert-cache",
        "--kv",
        "--max-context",
    ]


def test_pairs_are_offered_only_when_no_single_option_is_enough():
    options = PlanOptions(max_context=16_384, expert_cache=384, kv="f32")
    facts = machine(744 * MIB)
    plan = make_plan(facts, SMALL_MOE, options)
    assert not plan.feasible
    assert plan.changes
    for change in plan.changes:
        assert change.option.count("--") == 2
        assert make_plan(facts, SMALL_MOE, applied(options, change.option)).feasible


def test_when_nothing_helps_the_smallest_machine_is_named_and_would_do():
    plan = make_plan(machine(GIB), MIXTRAL, PlanOptions())
    (change,) = plan.changes
    assert change.option == ""
    needed = int(re.search(r"with ([\d,]+) MiB of available RAM", change.sentence)[1].replace(",", "")) * MIB
    assert make_plan(machine(needed), MIXTRAL, PlanOptions()).feasible
    assert not make_plan(machine(needed - MIB), MIXTRAL, PlanOptions()).feasible


def test_a_model_without_any_kv_cache_has_no_windows_to_speak_of():
    m = model(
        "no attention",
        "gpt-oss",
        layers=3,
        embedding=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=1000,
        feed_forward=256,
        attention_every=4,
        recurrent_bytes=MIB,
        window=128,
    )
    assert make_plan(machine(4 * GIB), m, PlanOptions()).feasible


def test_where_nothing_is_given_up_no_other_candidate_is_better():
    """The planner then looks at no other; here all of them are scored."""
    shortcuts = 0
    for seed in range(150):
        try:
            problem = Problem.of(*random_question(Random(seed)))
        except UsageError:
            continue
        if not problem.least().fits:
            continue
        backend = problem.backend
        traffic = backend.traffic(problem.request)
        scores = [
            turn_seconds(traffic, backend.speeds, c.placement)
            for c in candidates(backend, problem.request, problem.bounds)
        ]
        score, best = problem.best()
        assert score == min(scores)
        shortcuts += best.placement.slots == backend.experts.total
    assert shortcuts > 10
