"""The plan's invariants as properties over random machines, models and options.

Obedience to a plan (the fourth) is tested with the runtime's memory, planned against actual (the seventh) with a
process of its own: tests/runtime/test_memory.py and tests/runtime/test_promise.py.
"""

from random import Random

import msgspec
import pytest

from strata.doctor.candidates import candidates
from strata.doctor.facts import Facts
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.plan_io import check_saved
from strata.doctor.planner import Problem, backend_for, request_for
from strata.doctor.speed import Placement, turn_seconds
from strata.errors import PlanMismatch, UsageError
from strata.gguf.model_facts import ModelFacts
from tests.doctor.questions import invariant, make_plan, more_memory, plan_or_none, random_question
from tests.doctor.typed import applied, weaker


@invariant
def test_a_feasible_plan_keeps_every_budget_and_an_infeasible_one_says_why(rng: Random) -> None:
    plan = plan_or_none(*random_question(rng))
    if plan is None:
        return
    if plan.feasible:
        assert not broken(plan)
    else:
        assert plan.shortfall.missing_bytes > 0
        assert plan.changes


@invariant
def test_more_of_a_fact_never_makes_less_of_a_budget(rng: Random) -> None:
    facts, m, o = random_question(rng)
    larger, wider = more_memory(rng, facts, o)

    def free(facts: Facts, o: PlanOptions) -> dict[str, int]:
        return {bound.name: bound.free for bound in backend_for(facts, m, o).limits.bounds()}

    before, after = free(facts, o), free(larger, wider)
    assert before.keys() == after.keys()
    assert all(after[name] >= before[name] for name in before)


def score(facts: Facts, m: ModelFacts, o: PlanOptions) -> float:
    """The best score: of a placement in steps, on which the plan itself can only improve."""
    return Problem.of(facts, m, o).best()[0]


def seconds(facts: Facts, m: ModelFacts, plan: AllocationPlan) -> float:
    """The time of the reference turn by the plan's own numbers."""
    backend = backend_for(facts, m, plan.options)
    staging = plan.line("staging_ring")
    e = plan.experts
    placement = Placement(
        plan.chunk,
        plan.line("embedding").tier,
        staging.tier if staging else Tier.PAGEABLE,
        e.slots,
        e.pinned,
        e.pageable,
    )
    return turn_seconds(backend.traffic(request_for(backend, m, plan.options)), backend.speeds, placement)


@invariant
def test_more_memory_never_makes_a_plan_infeasible_nor_its_score_worse(rng: Random) -> None:
    facts, m, o = random_question(rng)
    plan = plan_or_none(facts, m, o)
    if plan is None or not plan.feasible:
        return
    larger, wider = more_memory(rng, facts, o)
    better = make_plan(larger, m, wider)
    assert better.feasible
    assert score(larger, m, wider) <= score(facts, m, o)
    assert seconds(facts, m, plan) <= score(facts, m, o) * (1 + 1e-12)


@invariant
def test_every_choice_exists_in_a_larger_budget_with_no_fewer_slots(rng: Random) -> None:
    facts, m, o = random_question(rng)
    larger, wider = more_memory(rng, facts, o)
    try:
        small, large = Problem.of(facts, m, o), Problem.of(larger, m, wider)
    except UsageError:
        return

    def slots(problem: Problem) -> dict[tuple[object, ...], int]:
        found = candidates(problem.backend, problem.request, problem.bounds)
        return {(w.chunk, w.embedding, w.staging, w.pinned, w.pageable): w.slots for w in (c.placement for c in found)}

    before, after = slots(small), slots(large)
    for choice, count in before.items():
        at_least = [n for other, n in after.items() if other[:4] == choice[:4] and other[4] >= choice[4]]
        assert max(at_least, default=-1) >= count


@invariant
def test_the_same_question_has_the_same_answer_to_the_byte(rng: Random) -> None:
    facts, m, o = random_question(rng)
    plan = plan_or_none(facts, m, o)
    if plan is None:
        return
    again = msgspec.json.decode(msgspec.json.encode((facts, m, o)), type=tuple[Facts, ModelFacts, PlanOptions])
    assert msgspec.json.encode(make_plan(*again)) == msgspec.json.encode(plan)


@invariant
def test_every_change_offered_works_and_is_the_smallest_of_its_option(rng: Random) -> None:
    facts, m, o = random_question(rng)
    plan = plan_or_none(facts, m, o)
    if plan is None or plan.feasible:
        return
    for change in plan.changes:
        if not change.option:
            continue
        assert make_plan(facts, m, applied(o, change.option)).feasible
        milder = weaker(o, change.option) if change.option.count("--") == 1 else None
        if milder is not None:
            refused = plan_or_none(facts, m, milder)
            assert refused is None or not refused.feasible


@invariant
def test_a_saved_plan_is_followed_exactly_while_every_memory_still_offers_what_it_takes(rng: Random) -> None:
    facts, m, o = random_question(rng)
    larger, _ = more_memory(rng, facts, o)
    plan = plan_or_none(larger, m, o)
    if plan is None or not plan.feasible:
        return
    plan = msgspec.json.decode(msgspec.json.encode(plan), type=AllocationPlan)
    assert check_saved(plan, larger, m)[0] == plan
    used = {tier: plan.planned_bytes(tier) for tier in Tier}
    backend = backend_for(facts, m, o)
    if all(bound.left(used) >= 0 for bound in backend.limits.bounds()):
        assert check_saved(plan, facts, m)[0] == plan
    else:
        with pytest.raises(PlanMismatch, match="not free now"):
            check_saved(plan, facts, m)
    line = rng.choice([line for line in plan.reservations if line.tier is not Tier.FILE])
    shorter = msgspec.structs.replace(line, bytes=line.bytes - rng.randint(1, line.bytes))
    edited = tuple(shorter if each is line else each for each in plan.reservations)
    if line.id in backend.measured_lines:  # charged as it is, whatever a plan says of it
        assert check_saved(msgspec.structs.replace(plan, reservations=edited), larger, m)[0] == plan
        return
    with pytest.raises(PlanMismatch, match=f'"{line.id}" needs'):
        check_saved(msgspec.structs.replace(plan, reservations=edited), larger, m)
