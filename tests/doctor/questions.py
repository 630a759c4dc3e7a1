"""Random questions to the planner: machines of every kind, models of every shape, options that may be meant together.

A property of plans is a function of a random generator, declared with `invariant`. The tests let hypothesis steer the
generator for a few hundred questions, and shrink what fails; `long_run` asks as many as wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor import planner
from strata.doctor.facts import CudaDevice, Facts, Overhead, PinnedFacts
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts
from tests.doctor.machines_with_gpus import REFUSED, gpu_machine
from tests.doctor.shapes import MIB, machine, model

QUICK = 400  # questions for each property
TYPES = ("Q4_K", "Q6_K", "IQ3_S", "Q8_0", "MXFP4", "F16")
T = TypeVar("T")
Question = tuple[Facts, ModelFacts, PlanOptions]
Property = Callable[[Random], None]
PROPERTIES: list[Property] = []


def invariant(holds: Property) -> Callable[[], None]:
    """Make a test of a property, and keep it for the long run."""
    PROPERTIES.append(holds)
    return settings(max_examples=QUICK, deadline=None)(given(st.randoms(use_true_random=False))(holds))


class Counter:
    """How many plans were made, and how many of them fit."""

    plans = 0
    feasible = 0


def make_plan(facts: Facts, m: ModelFacts, o: PlanOptions) -> AllocationPlan:
    """Plan, and count it."""
    plan = planner.make_plan(facts, m, o)
    Counter.plans += 1
    Counter.feasible += plan.feasible
    return plan


def plan_or_none(facts: Facts, m: ModelFacts, o: PlanOptions) -> AllocationPlan | None:
    """Return a plan, or None where the options cannot be meant for this model."""
    try:
        return make_plan(facts, m, o)
    except UsageError:
        return None


def memory(rng: Random) -> int:
    """256 MiB to 4 TiB, each power of two as likely as the next."""
    return (rng.randint(64, 128) << rng.randint(2, 15)) * MIB


def sometimes(rng: Random, draw: Callable[[], T]) -> T | None:
    """One time in four."""
    return draw() if rng.randrange(4) == 3 else None


def random_model(rng: Random) -> ModelFacts:
    experts = rng.choice((0, 4, 8, 60, 128, 512))
    kinds = [(rng.choice(TYPES), rng.choice(TYPES), rng.choice(TYPES)) for _ in range(rng.randint(1, 3))]
    return model(
        "random",
        rng.choice(("qwen3moe", "llama")),
        layers=rng.randint(1, 60),
        embedding=256 * rng.randint(1, 24),
        heads=rng.randint(1, 64),
        kv_heads=rng.randint(1, 16),
        head_dim=32 * rng.randint(1, 8),
        vocab=rng.randint(256, 250_000),
        experts=experts,
        top_k=rng.randint(1, min(experts, 10)) if experts else 0,
        width=256 * rng.randint(1, 12),
        feed_forward=0 if experts else 256 * rng.randint(1, 40),
        context_length=rng.choice((512, 8192, 131_072)),
        expert_types=tuple(kinds),
        tied=rng.random() < 0.5,
        attention_every=rng.choice((1, 1, 4)),
        recurrent_bytes=rng.choice((0, 0, 118 * MIB)),
        window=rng.choice((0, 0, 128)),
    )


def cpu_machine(rng: Random) -> Facts:
    """A machine without a GPU, in a container or not, its address space limited or not."""
    container = {}
    if rng.random() < 0.3:
        limit = memory(rng)
        container = {
            "cgroup_limit_bytes": limit,
            "cgroup_used_bytes": limit * rng.randint(0, 110) // 100,
            "cgroup_reclaimable_bytes": limit * rng.randint(0, 50) // 100,
        }
    if rng.random() < 0.2:
        container |= {"address_space_limit_bytes": memory(rng), "address_space_used_bytes": rng.randint(0, 900) * MIB}
    return machine(
        memory(rng),
        disk_bytes_per_s=rng.choice((5e6, 2e8, 7e9)),
        cpu_physical=rng.randint(1, 64),
        **container,
    )


SYSTEMS: tuple[dict[str, object], ...] = (
    {},
    {"wsl": "wsl2"},
    {"os": "windows", "wsl": None},
    {"os": "windows", "commit_limit_bytes": 1 << 37, "commit_used_bytes": 1 << 33},
    {"os": "windows", "swap_free_bytes": 1 << 34},
)


def random_gpu_machine(rng: Random) -> Facts:
    """A machine with one GPU: Linux, WSL2, Windows with its couplings, integrated, measured or not."""
    total = memory(rng)
    pinned = PinnedFacts(
        asked_bytes=memory(rng),
        granted_bytes=rng.choice((0, memory(rng))),
        ballast_bytes=memory(rng),
        refusal=rng.choice((None, REFUSED)),
    )
    cuda = CudaDevice(
        ordinal=0,
        uuid="GPU-0",
        vram_free_bytes=total * rng.randint(40, 100) // 100,
        context_bytes=rng.choice((None, rng.randint(100, 600) * MIB)),
        integrated=rng.choice((None, False, True)),
        overheads=rng.choice(({}, {"qwen3moe": Overhead(modules_bytes=90 * MIB, graphs_bytes=10 * MIB)})),
    )
    return gpu_machine(
        name=rng.choice(("NVIDIA GeForce RTX 4090", "NVIDIA H200", "NVIDIA Something")),
        vram_total=total,
        vram_free=total * rng.randint(50, 100) // 100,
        display=rng.choice((None, False, True)),
        ram=memory(rng),
        pinned=rng.choice((None, pinned)),
        cuda=rng.choice((None, cuda)),
        **rng.choice(SYSTEMS),
    )


def random_question(rng: Random) -> Question:
    """A machine, a model and options; few of them contradict each other."""
    cuda = rng.random() < 0.6
    m = random_model(rng)
    context = sometimes(rng, lambda: rng.randint(1, m.context_length))
    total = sum(len(c.layers) * c.experts_per_layer for c in m.expert_classes)
    options = PlanOptions(
        device="cuda" if cuda else "auto",
        max_context=context,
        kv=sometimes(rng, lambda: rng.choice(("f16", "int8" if cuda else "f32"))),
        prefill=sometimes(rng, lambda: rng.randint(1, min(context or 512, 5000))),
        expert_cache=sometimes(rng, lambda: rng.randint(1, total)) if total else None,
        ram_budget_bytes=sometimes(rng, lambda: memory(rng)),
        vram_budget_bytes=sometimes(rng, lambda: memory(rng)),
        pinned_budget_bytes=sometimes(rng, lambda: memory(rng)),
        vram_reserve_bytes=sometimes(rng, lambda: memory(rng) // 64) if cuda else None,
    )
    return random_gpu_machine(rng) if cuda else cpu_machine(rng), m, options


def more_memory(rng: Random, facts: Facts, o: PlanOptions) -> tuple[Facts, PlanOptions]:
    """Return the same question with more of one memory."""
    more = memory(rng)
    grow = msgspec.structs.replace
    host, nvml, pinned = facts.host.value, facts.nvml.value, facts.pinned.value
    larger = {}
    ram = {"ram_available_bytes": host.ram_available_bytes + more}
    if host.ram_total_bytes is not None:
        ram["ram_total_bytes"] = host.ram_total_bytes + more
    if host.cgroup_limit_bytes is not None:
        ram["cgroup_limit_bytes"] = host.cgroup_limit_bytes + more
    if host.address_space_limit_bytes is not None:
        ram["address_space_limit_bytes"] = host.address_space_limit_bytes + more
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
    which = rng.choice([*budgets, *larger])
    if which in larger:
        return larger[which], o
    return facts, grow(o, **{which: getattr(o, which) + more})
