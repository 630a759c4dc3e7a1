"""The plan's invariants as properties over random machines, models and options."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor.candidates import Rung, fill
from strata.doctor.facts import Facts
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import backend_for, make_plan, request_for
from strata.doctor.speed import Placement, turn_seconds
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts
from tests.doctor.shapes import MIB, machine, model

TYPES = ("Q4_K", "Q6_K", "IQ3_S", "Q8_0", "MXFP4", "F16")


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    experts = draw(st.sampled_from((0, 4, 8, 60, 128, 512)))
    kinds = st.tuples(*[st.sampled_from(TYPES)] * 3)
    return model(
        "random",
        draw(st.sampled_from(("qwen3moe", "llama"))),
        layers=draw(st.integers(1, 60)),
        embedding=256 * draw(st.integers(1, 24)),
        heads=draw(st.integers(1, 64)),
        kv_heads=draw(st.integers(1, 16)),
        head_dim=32 * draw(st.integers(1, 8)),
        vocab=draw(st.integers(256, 250_000)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 10))) if experts else 0,
        width=256 * draw(st.integers(1, 12)),
        feed_forward=0 if experts else 256 * draw(st.integers(1, 40)),
        context_length=draw(st.sampled_from((512, 8192, 131_072))),
        expert_types=tuple(draw(st.lists(kinds, min_size=1, max_size=3))),
        tied=draw(st.booleans()),
    )


memory = st.integers(100, 400_000).map(lambda mib: mib * MIB)


@st.composite
def machines(draw: st.DrawFn) -> Facts:
    container = {}
    if draw(st.booleans()):
        container = {
            "cgroup_limit_bytes": draw(memory),
            "cgroup_used_bytes": draw(memory) // 8,
            "cgroup_reclaimable_bytes": draw(memory) // 16,
        }
    return machine(
        draw(memory),
        disk_bytes_per_s=draw(st.sampled_from((5e6, 2e8, 7e9))),
        cpu_physical=draw(st.integers(1, 64)),
        **container,
    )


def optional(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


options = st.builds(
    PlanOptions,
    max_context=optional(st.integers(1, 8192)),
    kv=optional(st.sampled_from(("f32", "f16"))),
    prefill=optional(st.integers(1, 600)),
    expert_cache=optional(st.integers(1, 2000)),
    ram_budget_bytes=optional(memory),
    vram_budget_bytes=optional(memory),
    pinned_budget_bytes=optional(memory),
)


def plan_or_none(facts: Facts, m: ModelFacts, o: PlanOptions) -> AllocationPlan | None:
    """A plan, or None where the options cannot be meant for this model."""
    try:
        return make_plan(facts, m, o)
    except UsageError:
        return None


def score(facts: Facts, m: ModelFacts, plan: AllocationPlan) -> float:
    """The planner's own score, from the plan's numbers."""
    backend = backend_for(facts, m, plan.options)
    request = request_for(backend, m, plan.options)
    e = plan.experts
    staging = plan.line("staging_ring")
    placement = Placement(
        plan.chunk,
        plan.line("embedding").tier,
        staging.tier if staging else Tier.PAGEABLE,
        e.slots,
        e.pinned,
        e.pageable,
    )
    return turn_seconds(backend.traffic(request), backend.speeds, placement)


@given(machines(), models(), options)
@settings(max_examples=150, deadline=None)
def test_a_feasible_plan_keeps_every_budget_and_an_infeasible_one_says_why(facts, m, o):
    plan = plan_or_none(facts, m, o)
    if plan is None:
        return
    if plan.feasible:
        assert not broken(plan)
    else:
        assert plan.shortfall.missing_bytes > 0
        assert plan.changes


@given(machines(), models(), options)
@settings(max_examples=60, deadline=None)
def test_the_same_question_has_the_same_answer_to_the_byte(facts, m, o):
    plan = plan_or_none(facts, m, o)
    if plan is None:
        return
    again = msgspec.json.decode(msgspec.json.encode((facts, m, o)), type=tuple[Facts, ModelFacts, PlanOptions])
    assert msgspec.json.encode(make_plan(*again)) == msgspec.json.encode(plan)


def more_memory(draw: st.DrawFn, facts: Facts, o: PlanOptions) -> tuple[Facts, PlanOptions]:
    """The same question with more of one memory."""
    more = draw(memory)
    host = facts.host.value
    grown = {"ram_available_bytes": host.ram_available_bytes + more}
    if host.cgroup_limit_bytes is not None:
        grown["cgroup_limit_bytes"] = host.cgroup_limit_bytes + more
    budgets = [name for name in o.__struct_fields__ if name.endswith("budget_bytes") and getattr(o, name) is not None]
    which = draw(st.sampled_from([*budgets, "machine"]))
    if which == "machine":
        changed = msgspec.structs.replace(host, **grown)
        return msgspec.structs.replace(facts, host=msgspec.structs.replace(facts.host, value=changed)), o
    return facts, msgspec.structs.replace(o, **{which: getattr(o, which) + more})


@given(st.data(), machines(), models(), options)
@settings(max_examples=150, deadline=None)
def test_more_memory_never_makes_a_plan_infeasible_nor_its_score_worse(data, facts, m, o):
    plan = plan_or_none(facts, m, o)
    if plan is None or not plan.feasible:
        return
    larger, wider = more_memory(data.draw, facts, o)
    better = make_plan(larger, m, wider)
    assert better.feasible
    assert score(larger, m, better) <= score(facts, m, plan)


@given(st.data(), machines(), models(), options)
@settings(max_examples=60, deadline=None)
def test_with_all_else_fixed_more_memory_never_means_fewer_slots(data, facts, m, o):
    if plan_or_none(facts, m, o) is None:
        return
    small, large = backend_for(facts, m, o), backend_for(*(q := more_memory(data.draw, facts, o))[:1], m, q[1])
    request = request_for(small, m, o)
    held = data.draw(st.integers(0, small.experts.total)), data.draw(st.integers(0, small.experts.total))
    rung = Rung(data.draw(st.sampled_from(request.chunks)), data.draw(st.sampled_from(small.host_choices)), *held)
    fixed = small.fixed_lines(request, rung.chunk, rung.host)
    before = fill(small, request, small.limits.bounds(), rung, fixed)
    after = fill(large, request, large.limits.bounds(), rung, fixed)
    assert not before.fits or after.fits
    if before.fits and (before.placement.pinned, before.placement.pageable) == (
        after.placement.pinned,
        after.placement.pageable,
    ):
        assert after.placement.slots >= before.placement.slots
