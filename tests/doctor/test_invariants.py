"""The plan's invariants as properties over random machines, models and options."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor.candidates import candidates
from strata.doctor.facts import CudaDevice, Facts, PinnedFacts
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import Problem, backend_for, make_plan, request_for
from strata.doctor.speed import Placement, turn_seconds
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts
from tests.doctor.machines_with_gpus import REFUSED, gpu_machine
from tests.doctor.shapes import MIB, machine, model
from tests.doctor.typed import applied, weaker

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


@st.composite
def gpu_machines(draw: st.DrawFn) -> Facts:
    """Machines with one GPU of every kind: Linux, WSL2, Windows with its couplings, integrated, measured or not."""
    total = draw(memory)
    host = draw(
        st.sampled_from(
            (
                {},
                {"wsl": "wsl2"},
                {"os": "windows", "wsl": None},
                {"os": "windows", "commit_limit_bytes": 1 << 36, "commit_used_bytes": 1 << 33},
                {"os": "windows", "swap_free_bytes": 1 << 34},
            )
        )
    )
    measured = st.builds(
        PinnedFacts,
        asked_bytes=memory,
        granted_bytes=st.just(0) | memory,
        ballast_bytes=memory,
        refusal=st.none() | st.just(REFUSED),
    )
    cuda = st.builds(
        CudaDevice,
        ordinal=st.just(0),
        uuid=st.just("GPU-0"),
        vram_free_bytes=memory,
        context_bytes=st.none() | st.integers(100, 600).map(lambda mib: mib * MIB),
        integrated=st.none() | st.booleans(),
    )
    return gpu_machine(
        name=draw(st.sampled_from(("NVIDIA GeForce RTX 4090", "NVIDIA H200", "NVIDIA Something"))),
        vram_total=total,
        vram_free=min(total, draw(memory)),
        display=draw(st.none() | st.booleans()),
        ram=draw(memory),
        pinned=draw(st.none() | measured),
        cuda=draw(st.none() | cuda),
        **host,
    )


def optional(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


cpu_options = st.builds(
    PlanOptions,
    max_context=optional(st.integers(1, 8192)),
    kv=optional(st.sampled_from(("f32", "f16"))),
    prefill=optional(st.integers(1, 600)),
    expert_cache=optional(st.integers(1, 2000)),
    ram_budget_bytes=optional(memory),
    vram_budget_bytes=optional(memory),
    pinned_budget_bytes=optional(memory),
)

gpu_options = st.builds(
    PlanOptions,
    device=st.just("cuda"),
    max_context=optional(st.integers(1, 100_000)),
    kv=optional(st.sampled_from(("f16", "int8"))),
    prefill=optional(st.integers(1, 5000)),
    expert_cache=optional(st.integers(1, 2000)),
    ram_budget_bytes=optional(memory),
    vram_budget_bytes=optional(memory),
    pinned_budget_bytes=optional(memory),
    vram_reserve_bytes=optional(memory.map(lambda nbytes: nbytes // 64)),
)
questions = st.tuples(machines(), models(), cpu_options) | st.tuples(gpu_machines(), models(), gpu_options)


def plan_or_none(facts: Facts, m: ModelFacts, o: PlanOptions) -> AllocationPlan | None:
    """A plan, or None where the options cannot be meant for this model."""
    try:
        return make_plan(facts, m, o)
    except UsageError:
        return None


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


@given(questions)
@settings(max_examples=150, deadline=None)
def test_a_feasible_plan_keeps_every_budget_and_an_infeasible_one_says_why(question):
    facts, m, o = question
    plan = plan_or_none(facts, m, o)
    if plan is None:
        return
    if plan.feasible:
        assert not broken(plan)
    else:
        assert plan.shortfall.missing_bytes > 0
        assert plan.changes


@given(questions)
@settings(max_examples=150, deadline=None)
def test_the_first_change_offered_is_the_smallest_that_works(question):
    facts, m, o = question
    plan = plan_or_none(facts, m, o)
    if plan is None or plan.feasible or not plan.changes[0].option:
        return
    for change in plan.changes:
        assert make_plan(facts, m, applied(o, change.option)).feasible
    first = plan.changes[0].option
    milder = weaker(o, first) if first.count("--") == 1 else None
    if milder is not None:
        assert not make_plan(facts, m, milder).feasible


@given(questions)
@settings(max_examples=60, deadline=None)
def test_the_same_question_has_the_same_answer_to_the_byte(question):
    facts, m, o = question
    plan = plan_or_none(facts, m, o)
    if plan is None:
        return
    again = msgspec.json.decode(msgspec.json.encode((facts, m, o)), type=tuple[Facts, ModelFacts, PlanOptions])
    assert msgspec.json.encode(make_plan(*again)) == msgspec.json.encode(plan)


def more_memory(draw: st.DrawFn, facts: Facts, o: PlanOptions) -> tuple[Facts, PlanOptions]:
    """The same question with more of one memory."""
    more = draw(memory)
    grow = msgspec.structs.replace
    host, nvml, pinned = facts.host.value, facts.nvml.value, facts.pinned.value
    larger = {}
    ram = {"ram_available_bytes": host.ram_available_bytes + more}
    if host.ram_total_bytes is not None:
        ram["ram_total_bytes"] = host.ram_total_bytes + more
    if host.cgroup_limit_bytes is not None:
        ram["cgroup_limit_bytes"] = host.cgroup_limit_bytes + more
    larger["ram"] = grow(facts, host=grow(facts.host, value=grow(host, **ram)))
    if host.commit_limit_bytes is not None:
        wider = grow(host, commit_limit_bytes=host.commit_limit_bytes + more)
        larger["commit"] = grow(facts, host=grow(facts.host, value=wider))
    if nvml is not None and nvml.gpus:
        (gpu,) = nvml.gpus
        card = grow(nvml, gpus=(grow(gpu, vram_free_bytes=gpu.vram_free_bytes + more),))
        larger["vram"] = grow(facts, nvml=grow(facts.nvml, value=card))
    if pinned is not None and pinned.granted_bytes:
        granted = grow(pinned, granted_bytes=pinned.granted_bytes + more)
        larger["pinned"] = grow(facts, pinned=grow(facts.pinned, value=granted))
    budgets = [name for name in o.__struct_fields__ if name.endswith("budget_bytes") and getattr(o, name) is not None]
    which = draw(st.sampled_from([*budgets, *larger]))
    if which in larger:
        return larger[which], o
    return facts, grow(o, **{which: getattr(o, which) + more})


@given(st.data(), questions)
@settings(max_examples=150, deadline=None)
def test_more_memory_never_makes_a_plan_infeasible_nor_its_score_worse(data, question):
    facts, m, o = question
    plan = plan_or_none(facts, m, o)
    if plan is None or not plan.feasible:
        return
    larger, wider = more_memory(data.draw, facts, o)
    better = make_plan(larger, m, wider)
    assert better.feasible
    assert score(larger, m, wider) <= score(facts, m, o)
    assert seconds(facts, m, plan) <= score(facts, m, o) * (1 + 1e-12)


@given(st.data(), questions)
@settings(max_examples=60, deadline=None)
def test_every_choice_exists_in_a_larger_budget_with_no_fewer_slots(data, question):
    facts, m, o = question
    if plan_or_none(facts, m, o) is None:
        return
    larger, wider = more_memory(data.draw, facts, o)
    small, large = Problem.of(facts, m, o), Problem.of(larger, m, wider)

    def slots(problem: Problem) -> dict[tuple[object, ...], int]:
        found = candidates(problem.backend, problem.request, problem.bounds)
        return {(w.chunk, w.embedding, w.staging, w.pinned, w.pageable): w.slots for w in (c.placement for c in found)}

    before, after = slots(small), slots(large)
    for choice, count in before.items():
        at_least = [n for other, n in after.items() if other[:4] == choice[:4] and other[4] >= choice[4]]
        assert max(at_least, default=-1) >= count
