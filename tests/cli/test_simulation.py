"""`--simulate`: what its file may say, its command line, and that what is suggested there starts there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.cli.preflight import OpenModel
from strata.cli.simulation import Simulated, simulate
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.planner import make_plan
from strata.errors import StrataError, Undetermined, UsageError
from strata.runtime.simulated import Fault
from tests.doctor.typed import applied, weaker

from .runner import MODEL, assert_clear, strata
from .simulated import (
    MIB,
    MOSTLY_EXPERTS,
    Events,
    generated,
    loaded,
    machine_file,
    opened,
    written,
)

SEED_2 = str(machine_file("seed-002-no-desktop"))
CASES = 50
MACHINES = (
    "seed-000-budget-exhausted",
    "seed-002-no-desktop",
    "seed-002-desktop-on-card",
    "desktop-4070tis",
    "h200-server",
    "win-thin-reserve",
    "win11-32gib-half",
    "wsl2-5080-docker-context",
)
# What makes a plan impossible: too much asked for, too little allowed, and machines too small for what is usual.
ASKED: tuple[tuple[float, dict[str, Any]], ...] = (
    (1, {"vram_budget_bytes": 9 * MIB}),
    (1, {"ram_budget_bytes": 2 * MIB}),
    (1, {"expert_cache": 60}),
    (1, {"expert_cache": 30, "max_context": 2048}),
    (1.6, {"prefill": 2048}),
    (1.6, {"vram_budget_bytes": 7 * MIB, "kv": "f16"}),
    (2, {"kv": "f16", "vram_reserve_bytes": 5 * MIB}),
    (2.1, {}),
    (2.6, {"kv": "f16"}),
    (3, {"ram_budget_bytes": 1 * MIB, "vram_budget_bytes": 4 * MIB}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return opened(MOSTLY_EXPERTS.write(tmp_path_factory.mktemp("model") / "model.gguf"))


def infeasible(model: OpenModel) -> Iterator[tuple[str, Simulated, AllocationPlan]]:
    """Every combination of the above that does not fit, though an option could change that."""
    for (smaller, asked), name in product(ASKED, MACHINES):
        whole = simulate(machine_file(name), model.facts, PlanOptions())
        assert whole.options.shrink
        it = simulate(machine_file(name), model.facts, PlanOptions(**asked), shrink=whole.options.shrink * smaller)
        plan = make_plan(it.facts, model.facts, it.options)
        if not plan.feasible and plan.changes[0].option:
            yield f"{name}, 1/{smaller}, {asked}", it, plan


def plans(it: Simulated, model: OpenModel, options: PlanOptions) -> AllocationPlan | None:
    """A plan that fits, if there is one."""
    try:
        plan = make_plan(it.facts, model.facts, options)
    except UsageError:
        return None
    return plan if plan.feasible else None


def weaker_steps(options: PlanOptions, typed: str) -> list[PlanOptions]:
    """The options after a change of which one part is a step weaker; a part without steps is left out instead."""
    words = typed.split()
    parts = [f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    steps = []
    for part in parts:
        others = options
        for other in parts:
            others = others if other == part else applied(others, other)
        steps.append(weaker(others, part) or others)
    return steps


def test_what_is_suggested_starts_and_the_next_weaker_step_does_not_plan(model: OpenModel) -> None:
    kinds, started = set(), 0
    for case, it, plan in infeasible(model):
        first = plan.changes[0].option
        chosen = plans(it, model, applied(it.options, first))
        assert chosen, f"{case}: {first} does not plan"
        log = Events()
        with loaded(model, chosen, it, log) as engine:
            generated(engine, [1, 2, 3])
        assert "replan" not in log.kinds, f"{case}: {first} plans, but does not start as planned"
        started += 1
        for milder in weaker_steps(it.options, first):
            assert not plans(it, model, milder), f"{case}: {first} is not the smallest change"
        kinds.add(" ".join(word for word in first.split() if word.startswith("--")))
    assert started >= CASES
    print(started, sorted(kinds))
    assert len(kinds) >= 6, kinds


small = st.none() | st.integers(0, 40 * MIB)


@given(
    machine=st.sampled_from(MACHINES),
    smaller=st.floats(0.5, 4),
    max_context=st.none() | st.integers(1, 2048),
    kv=st.sampled_from([None, "f16", "f32"]),
    prefill=st.none() | st.integers(1, 600),
    expert_cache=st.none() | st.integers(1, 64),
    vram_budget_bytes=small,
    ram_budget_bytes=small,
    pinned_budget_bytes=small,
    vram_reserve_bytes=st.none() | st.integers(0, 4 * MIB),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_planned_starts_as_planned(
    model: OpenModel, machine: str, smaller: float, **asked: int | str | None
) -> None:
    whole = simulate(machine_file(machine), model.facts, PlanOptions())
    assert whole.options.shrink
    options = PlanOptions(**asked)  # type: ignore[arg-type]
    it = simulate(machine_file(machine), model.facts, options, shrink=whole.options.shrink * smaller)
    plan = plans(it, model, it.options)
    if plan is None:
        return
    assert broken(plan) == ()
    log = Events()
    with loaded(model, plan, it, log) as engine:
        generated(engine, [1], steps=min(1, plan.context - 1))
        assert engine.memory_report().difference_bytes >= 0
    assert "replan" not in log.kinds


def test_the_section_simulation_is_read(model: OpenModel, tmp_path: Path) -> None:
    path = written(
        "seed-002-no-desktop",
        tmp_path,
        vram_taken_bytes=1 << 30,
        couplings=["commit"],
        pinned_bytes=2 << 30,
        faults=[{"call": "cudaHostRegister", "nth": 3, "code": 100}, {"call": "malloc", "code": 12}],
    )
    machine = simulate(path, model.facts, PlanOptions(), shrink=1024).machine
    assert (machine.vram_taken_bytes, machine.pinned_bytes) == (MIB, 2 * MIB)
    assert (machine.shared_bytes, machine.registered_bytes) == (None, None)
    assert machine.commit_bytes
    assert [(f.code, f.name) for f in machine.faults] == [(100, "cudaErrorNoDevice"), (12, "ENOMEM")]


def test_what_was_recorded_stands_in_for_what_the_section_leaves_out(model: OpenModel) -> None:
    windows = simulate(machine_file("seed-002-no-desktop"), model.facts, PlanOptions(), shrink=1).machine
    assert (windows.vram_told_bytes, windows.vram_bytes) == (16795041792, 16795041792)
    assert windows.shared_bytes == 13736345600 + 48318382080
    assert windows.registered_bytes == 0
    assert windows.commit_bytes == 81054622810 - 13086765351
    wsl2 = simulate(machine_file("seed-000-budget-exhausted"), model.facts, PlanOptions(), shrink=1).machine
    assert (wsl2.pinned_bytes, wsl2.pin_step_bytes) == (1006632960, 67108864)
    assert (wsl2.shared_bytes, wsl2.registered_bytes, wsl2.commit_bytes) == (None, None, None)
    broken = simulate(machine_file("seed-000-broken-context"), model.facts, PlanOptions(), shrink=1).machine
    error = {"name": "cudaErrorNoDevice", "string": "no CUDA-capable device is detected"}
    assert broken.faults == (Fault(code=100, **error),)


@pytest.mark.parametrize(
    ("section", "words"),
    [({"cuplings": []}, "cuplings"), ({"faults": [{"nth": "two"}]}, "faults"), ({"couplings": ["wddm"]}, "wddm")],
)
def test_a_wrong_section_is_refused_in_words(
    model: OpenModel, section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written("seed-002-no-desktop", tmp_path, **section)
    with pytest.raises(UsageError) as caught:
        simulate(path, model.facts, PlanOptions())
    assert words in caught.value.found


@pytest.mark.parametrize(
    ("options", "shrink", "error"),
    [(PlanOptions(device="cpu"), None, UsageError), (PlanOptions(), 0.0, UsageError), (PlanOptions(), inf, UsageError)],
)
def test_what_makes_no_sense_is_refused(
    model: OpenModel, options: PlanOptions, shrink: float | None, error: type[StrataError]
) -> None:
    with pytest.raises(error):
        simulate(Path(SEED_2), model.facts, options, shrink=shrink)


def test_a_machine_without_a_gpu_is_refused(model: OpenModel) -> None:
    with pytest.raises(Undetermined):
        simulate(machine_file("macbook"), model.facts, PlanOptions())


def test_a_run_on_a_simulated_machine_answers_and_says_what_it_is() -> None:
    result = strata("run", MODEL, "--simulate", SEED_2, "-p", "Hi", "--no-chat", "--max-tokens", "2", "--temp", "0")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stderr.split())
    for words in ("RTX 5060 Ti, simulated", "as it was recorded", "divided by", "less than planned"):
        assert words in said
    plain = strata("run", MODEL, "--device", "cpu", "-p", "Hi", "--no-chat", "--max-tokens", "2", "--temp", "0")
    assert result.stdout == plain.stdout


def test_a_broken_gpu_is_told_of_and_done_without() -> None:
    facts = str(machine_file("seed-000-broken-context"))
    command = ("run", MODEL, "--simulate", facts, "-p", "Hi", "--no-chat", "--max-tokens", "1", "--json")
    result = strata(*command)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["device"]["backend"] == "numpy"
    said = " ".join(result.stderr.split())
    for words in ("(100 cudaErrorNoDevice)", "the GPU cannot be used at all", "on the CPU"):
        assert words in said
    insisted = strata(*command, "--device", "cuda")
    assert_clear(insisted, 1, "cudaErrorNoDevice", "WSL2", "strata doctor", "nothing stays allocated")


def test_a_plan_for_a_simulated_machine_is_saved_and_followed_there_only(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    made = strata("plan", MODEL, "--simulate", SEED_2, "-o", plan)
    assert made.returncode == 0, made.stderr
    assert f"--plan {plan} --simulate {SEED_2}" in made.stderr
    run = ("run", MODEL, "-p", "Hi", "--no-chat", "--max-tokens", "1")
    assert strata(*run, "--plan", plan, "--simulate", SEED_2).returncode == 0
    assert_clear(strata(*run, "--plan", plan), 1, "simulated", "--simulate FACTS")
    other = str(machine_file("seed-000-budget-exhausted"))
    assert_clear(strata(*run, "--plan", plan, "--simulate", other), 1, "RTX 4090")
    own = str(tmp_path / "own.json")
    assert strata("plan", MODEL, "--device", "cpu", "-o", own).returncode == 0
    assert_clear(strata(*run, "--plan", own, "--simulate", SEED_2), 1, "not simulated")


def test_two_machines_at_once_are_refused() -> None:
    assert_clear(strata("plan", MODEL, "--simulate", SEED_2, "--facts", SEED_2), 2, "--facts", "Leave one")
