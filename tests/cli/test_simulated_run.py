"""Recorded machines run to an answer: both reports in all their states, and Windows under each of its couplings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.cli.preflight import OpenModel
from strata.doctor.facts_io import read_facts
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.units import PAGE
from strata.errors import Undetermined
from strata.runtime.engine import Engine
from strata.runtime.memory import MemoryRefused
from strata.runtime.runlog import log_folder, run_logs
from strata.runtime.simulated import MALLOC, SimulatedDevice
from tests.demo import open_demo
from tests.runtime.plans import planned
from tests.tiny_model import TinyModel

from .runner import MODEL, strata
from .simulated import (
    CHUNK,
    FIXTURES,
    OPTIONS,
    PROMPT,
    SEEDS,
    Events,
    generated,
    loaded,
    machine_file,
    opened,
    outcome,
    reference,
    simulated_plan,
    written,
)

pytestmark = pytest.mark.usefixtures("counted")


COUPLINGS: dict[str, dict[str, Any]] = {
    "none": {"shared_bytes": None, "registered_bytes": None, "commit_bytes": None},
    "one budget": {"registered_bytes": None, "commit_bytes": None},
    "device memory refused after pins": {"shared_bytes": None, "registered_bytes": 0, "commit_bytes": None},
    "commit limit": {"shared_bytes": None, "registered_bytes": None},
    "all": {},
}


@pytest.mark.parametrize("coupling", list(COUPLINGS))
@pytest.mark.parametrize("machine", SEEDS)
def test_both_reports_run_to_an_answer_in_all_their_states(
    model: OpenModel, answer: list[bytes], machine: str, coupling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    it, _ = simulated_plan(model, machine_file(machine), OPTIONS, **COUPLINGS[coupling])
    found = outcome(model, it, answer, capsys)
    assert found == ("on the CPU" if machine == "seed-000-broken-context" else "runs")
    assert (it.machine.shared_bytes is None) or machine.startswith("seed-002"), "only Windows has couplings"


def windows_machines() -> list[str]:
    """Every recorded Windows machine whose GPU this model fits on."""
    fit = []
    for path in sorted((FIXTURES / "machines").glob("*.json")):
        facts = read_facts(path)
        if facts.host.value and facts.host.value.os == "windows":
            fit.append(path.stem)
    return fit


@pytest.mark.parametrize("coupling", list(COUPLINGS))
@pytest.mark.parametrize("machine", windows_machines())
def test_plans_for_windows_start_under_each_coupling(
    model: OpenModel, answer: list[bytes], machine: str, coupling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    it, plan = simulated_plan(model, machine_file(machine), OPTIONS, faults=(), **COUPLINGS[coupling])
    if plan.feasible:
        assert outcome(model, it, answer, capsys) == "runs"
    else:
        assert plan.changes


@pytest.mark.parametrize("machine", sorted(path.stem for path in (FIXTURES / "machines").glob("*.json")))
def test_every_recorded_machine_that_is_planned_for_starts(
    model: OpenModel, answer: list[bytes], machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        it, plan = simulated_plan(model, machine_file(machine), OPTIONS)
    except Undetermined:
        pytest.skip("no GPU was seen there")
    if not plan.feasible:
        pytest.skip("too little memory is free there")
    assert outcome(model, it, answer, capsys) == ("on the CPU" if it.machine.faults else "runs")


@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop"])
@pytest.mark.parametrize("slots", [2, 3])
def test_logits_are_the_plain_backend_s_to_the_bit(model: OpenModel, machine: str, slots: int) -> None:
    """At the same chunk size, over several chunks and steps, with experts in every memory."""
    prompt = [(7 * i + 1) % 200 for i in range(3 * CHUNK + 1)]
    options = PlanOptions(prefill=CHUNK, expert_cache=slots, pinned_budget_bytes=300 << 10, ram_budget_bytes=4 << 20)
    it, plan = simulated_plan(model, machine_file(machine), options)
    with loaded(model, plan, it) as engine:
        logits = generated(engine, prompt, steps=4)
    with Engine.load(model.file, planned(model.file, prefill=CHUNK)) as engine:
        assert logits == generated(engine, prompt, steps=4)


def test_logs_of_simulated_runs_are_not_taken_for_this_machine_s() -> None:
    assert run_logs(log_folder()) == []
    result = strata(
        "run", MODEL, "--simulate", str(machine_file(SEEDS[0])), "-p", "Hi", "--no-chat", "--max-tokens", "1"
    )
    assert result.returncode == 0, result.stderr
    assert "prompt " in result.stderr
    assert "(expected" not in result.stderr  # of a GPU, which the CPU that computes here is not
    assert run_logs(log_folder()) == []
    assert len(run_logs(log_folder() / "simulated")) == 1


@pytest.fixture(scope="module")
def demo() -> str:
    """Path of the demo model, found before the tests' own cache folder hides a person's."""
    with open_demo() as file:
        return str(file.path)


@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop", "seed-002-desktop-on-card"])
def test_a_dense_model_has_room_too(tmp_path: Path, machine: str) -> None:
    dense = opened(TinyModel(architecture="llama", experts=0).write(tmp_path / "dense.gguf"))
    it, plan = simulated_plan(dense, machine_file(machine))
    assert plan.feasible
    with loaded(dense, plan, it, log := Events()) as engine:
        assert generated(engine, PROMPT) == reference(dense.file, PROMPT, chunk=plan.chunk)
    assert "replan" not in log.kinds
    assert "experts" not in it.notes[0]


@pytest.mark.demo
@pytest.mark.parametrize(
    ("machine", "couplings"),
    [
        *((machine, None) for machine in SEEDS),
        *(("seed-002-no-desktop", [kind]) for kind in ("shared", "registered", "commit")),
    ],
)
def test_the_demo_answers_on_both_reports_machines(
    demo: str, machine: str, couplings: list[str] | None, tmp_path: Path
) -> None:
    facts = written(machine, tmp_path, **({} if couplings is None else {"couplings": couplings}))
    question = ("-p", "What is the capital of France?", "--temp", "0", "--max-tokens", "12")
    result = strata("run", demo, "--simulate", str(facts), *question)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


@pytest.mark.parametrize("coupling", ["shared_bytes", "registered_bytes", "commit_bytes"])
def test_the_order_of_the_second_report_is_refused_where_ours_starts(model: OpenModel, coupling: str) -> None:
    """That engine uploaded the head after page-locking the experts: every coupling refuses it, with VRAM free."""
    it, plan = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS)
    pinned = plan.planned_bytes(Tier.PINNED)
    together = plan.planned_bytes(Tier.VRAM) + pinned - PAGE
    most = {"shared_bytes": together, "registered_bytes": pinned - 1, "commit_bytes": together}
    none = {"shared_bytes": None, "registered_bytes": None, "commit_bytes": None}
    device = SimulatedDevice(msgspec.structs.replace(it.machine, **none | {coupling: most[coupling]}))
    device_lines = [line for line in plan.reservations if line.tier is Tier.VRAM and line.id not in ("context", "head")]
    theirs = device_lines + [line for line in plan.reservations if line.tier is Tier.PINNED]
    with ExitStack() as taken:
        for line in theirs:
            taken.callback(device.take(line).release)
        head = plan.line("head")
        assert head is not None
        with pytest.raises(MemoryRefused) as caught:
            device.take(head)
    assert (caught.value.call, caught.value.code) == (MALLOC, 2)
    assert caught.value.free_bytes
