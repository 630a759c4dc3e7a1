"""Whatever a device refuses, loading ends in one re-plan that runs or in a clear refusal, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.cli.preflight import OpenModel
from strata.cli.simulation import Simulated
from strata.doctor.facts_io import read_facts
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.units import PAGE
from strata.errors import AllocationFailed, Undetermined
from strata.runtime.engine import Engine
from strata.runtime.memory import HostBlock, MemoryRefused
from strata.runtime.runlog import log_folder, run_logs
from strata.runtime.simulated import HOST_MALLOC, MALLOC, PIN, Fault, SimulatedDevice
from tests.demo import open_demo
from tests.runtime.counted import CountedBlock
from tests.runtime.plans import planned
from tests.tiny_model import TinyModel

from .runner import MODEL, strata
from .simulated import (
    FIXTURES,
    GOLDEN,
    SEEDS,
    Events,
    generated,
    loaded,
    machine_file,
    opened,
    reference,
    simulated_plan,
    written,
)

PROMPT = [3, 14, 15]
CHUNK = 8
OPTIONS = PlanOptions(prefill=CHUNK)  # at the context that the machine's size goes by, few experts have a slot
NO_DEVICE = {"code": 100, "name": "cudaErrorNoDevice", "string": "no CUDA-capable device is detected"}
ILLEGAL = {"code": 700, "name": "cudaErrorIllegalAddress", "string": "an illegal memory access was encountered"}
FULL = {"code": 2, "name": "cudaErrorMemoryAllocation", "string": "out of memory"}
NO_RAM = {"call": HOST_MALLOC, "code": 12, "name": "ENOMEM", "string": "Cannot allocate memory"}
KINDS: dict[str, dict[str, Any]] = {
    "out of memory once": {**FULL, "times": 1},
    "out of memory from then on": FULL,
    "no device once": {**NO_DEVICE, "times": 1},
    "no device from then on": NO_DEVICE,
    "illegal address, which sticks": {**ILLEGAL, "sticky": True},
    "pin refused once": {**FULL, "call": PIN, "times": 1},
    "pins refused from then on": {**FULL, "call": PIN},
    "pins refused for want of a device": {**NO_DEVICE, "call": PIN},
    "a pin that breaks the context": {**NO_DEVICE, "call": PIN, "sticky": True},
    "RAM refused once": {**NO_RAM, "times": 1},
    "RAM refused from then on": NO_RAM,
    "anything refused once": {**FULL, "call": "", "times": 1},
}

BROKEN = {"no device from then on", "illegal address, which sticks", "a pin that breaks the context"}
# A pin that is refused is a budget, an odd code that goes away is tried again, and without a GPU there is the CPU. Not
# among them: pins that are granted once and refused the next time, whatever their bytes.
NEVER_REFUSED = BROKEN | {"no device once", "pin refused once", "pins refused for want of a device"}


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return opened(GOLDEN / "qwen3moe-Q8_0.gguf")


@pytest.fixture(scope="module")
def answer(model: OpenModel) -> list[bytes]:
    return reference(model.file, PROMPT, chunk=CHUNK)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count every block, whichever backend takes it."""
    CountedBlock.alive = 0
    monkeypatch.setattr("strata.runtime.simulated.HostBlock", CountedBlock)
    monkeypatch.setattr("strata.runtime.memory.HostBlock", CountedBlock)
    yield
    assert CountedBlock.alive == 0


def outcome(model: OpenModel, it: Simulated, answer: list[bytes], capsys: pytest.CaptureFixture[str]) -> str:
    """Load, and see that it ends as it must; return "runs", "re-planned", "on the CPU" or "refused"."""
    plan, log = make_plan(it.facts, model.facts, it.options), Events()
    assert plan.feasible
    capsys.readouterr()
    try:
        engine = loaded(model, plan, it, log)
    except AllocationFailed as error:
        return is_clear(error, log)
    with engine:
        assert CountedBlock.alive > 0
        assert generated(engine, PROMPT) == answer
        on_cpu = engine.plan.device.backend == "numpy"
        assert on_cpu or engine.memory_report().difference_bytes >= 0
    said = " ".join(capsys.readouterr().err.split())
    replans = log.kinds.count("replan")
    assert replans == said.count("Planning once more: ") + said.count("trying once more") <= 1
    return "on the CPU" if on_cpu else "re-planned" if replans else "runs"


def is_clear(error: AllocationFailed, log: Events) -> str:
    """See that a refusal names the line and what was refused, leaves nothing, and came after one re-plan at most."""
    assert CountedBlock.alive == 0
    assert log.kinds.count("replan") <= 1
    for words in ("refused", f'"{error.line}"', "nothing stays allocated"):
        assert words in error.found
    assert error.remedy
    return "refused"


def calls_of(it: Simulated, model: OpenModel) -> int:
    """How many calls a load without faults makes."""
    device = SimulatedDevice(msgspec.structs.replace(it.machine, faults=()))
    plan = make_plan(it.facts, model.facts, it.options)
    with Engine.load(model.file, plan, take=device.take):
        return device.calls


def every_outcome(
    model: OpenModel,
    answer: list[bytes],
    kind: str,
    machine: str,
    device: str,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """The outcome with the fault at each call of a whole load; the last one is never made."""
    options = msgspec.structs.replace(OPTIONS, device=device)
    whole, _ = simulated_plan(model, machine_file(machine), options)
    seen = []
    for nth in range(1, calls_of(whole, model) + 2):
        it, _ = simulated_plan(model, machine_file(machine), options, faults=(Fault(nth=nth, **KINDS[kind]),))
        seen.append(outcome(model, it, answer, capsys))
    assert seen[-1] == "runs"
    return seen


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop"])
def test_every_single_failure_ends_well(
    model: OpenModel, answer: list[bytes], kind: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set(every_outcome(model, answer, kind, machine, "auto", capsys))
    no_pageable = machine.startswith("seed-002") and kind.startswith("RAM")
    assert seen == {"runs"} if no_pageable else seen > {"runs"}
    if kind in BROKEN:
        assert "on the CPU" in seen
        assert "refused" not in seen
    elif not no_pageable:
        assert "on the CPU" not in seen
        assert kind not in NEVER_REFUSED or seen == {"runs", "re-planned"}


@pytest.mark.parametrize("kind", [kind for kind, fault in KINDS.items() if fault["code"] in (100, 700)])
def test_a_gpu_that_is_insisted_on_is_not_given_up(
    model: OpenModel, answer: list[bytes], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set(every_outcome(model, answer, kind, "seed-000-budget-exhausted", "cuda", capsys))
    assert seen == {"runs", "re-planned" if kind in NEVER_REFUSED - BROKEN else "refused"}


@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop"])
@pytest.mark.parametrize("call", [MALLOC, PIN, HOST_MALLOC])
def test_every_size_from_which_calls_fail_ends_well(
    model: OpenModel, answer: list[bytes], call: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    it, plan = simulated_plan(model, machine_file(machine), OPTIONS)
    if call == HOST_MALLOC and machine.startswith("seed-002"):
        pytest.skip("nothing lies in pageable RAM there")
    code = NO_RAM if call == HOST_MALLOC else FULL
    sizes = {
        min(line.bytes, it.machine.pin_step_bytes) if line.tier is Tier.PINNED else line.bytes
        for line in plan.reservations
    }
    seen = set()
    for nbytes in sorted(sizes | {0}):
        fault = Fault(**code | {"call": call}, from_bytes=nbytes)
        it, _ = simulated_plan(model, machine_file(machine), OPTIONS, faults=(fault,))
        seen.add(outcome(model, it, answer, capsys))
    assert seen - {"runs"}


@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop"])
def test_this_machine_s_own_ram_is_told_from_the_simulated_one_s(
    model: OpenModel, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, plan = simulated_plan(model, machine_file(machine), OPTIONS)
    with loaded(model, plan, it):
        lines = CountedBlock.alive
    for nth in range(lines):
        left = nth

        def few(nbytes: int) -> CountedBlock:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(12, "Cannot allocate memory")
            return CountedBlock(nbytes)

        monkeypatch.setattr("strata.runtime.simulated.HostBlock", few)
        log = Events()
        with pytest.raises(AllocationFailed, match="This machine itself refuses it") as caught:
            loaded(model, plan, it, log)
        is_clear(caught.value, log)
        assert "replan" not in log.kinds


def test_ctrl_c_while_memory_is_taken_leaves_none(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    it, plan = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS)

    def third(nbytes: int) -> CountedBlock:
        if CountedBlock.alive == 2:
            raise KeyboardInterrupt
        return CountedBlock(nbytes)

    monkeypatch.setattr("strata.runtime.simulated.HostBlock", third)
    with pytest.raises(KeyboardInterrupt):
        loaded(model, plan, it)


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


def test_what_someone_took_since_the_plan_is_planned_around(
    model: OpenModel, answer: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    it, plan = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS)
    reserve = plan.budgets[0].reserve_bytes
    left = plan.budgets[0].usable_bytes - plan.planned_bytes(Tier.VRAM)
    for taken, found in ((left, "runs"), (left + reserve // 2 + plan.experts.slot_bytes, "re-planned")):
        it, _ = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS, vram_taken_bytes=taken)
        assert outcome(model, it, answer, capsys) == found


def test_a_driver_that_grants_less_than_it_tells_is_planned_around(
    model: OpenModel, answer: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    it, plan = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS)
    granted = plan.planned_bytes(Tier.VRAM) - PAGE
    it, _ = simulated_plan(model, machine_file("seed-002-no-desktop"), OPTIONS, vram_bytes=granted)
    assert it.machine.vram_told_bytes > granted
    assert outcome(model, it, answer, capsys) == "re-planned"


@pytest.mark.parametrize("machine", ["seed-000-budget-exhausted", "seed-002-no-desktop"])
@pytest.mark.parametrize("part", [0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_smaller_budget_for_pins_than_recorded_is_planned_around(
    model: OpenModel, answer: list[bytes], machine: str, part: float, capsys: pytest.CaptureFixture[str]
) -> None:
    it, plan = simulated_plan(model, machine_file(machine), OPTIONS)
    granted = int(part * plan.planned_bytes(Tier.PINNED))
    it, _ = simulated_plan(model, machine_file(machine), OPTIONS, pinned_bytes=granted)
    assert outcome(model, it, answer, capsys) == "re-planned"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({**FULL, "call": PIN}, ("(2 cudaErrorMemoryAllocation)", "The GPU itself works", "pageable RAM")),
        ({**NO_DEVICE, "call": PIN}, ("(100 cudaErrorNoDevice)", "The GPU itself works", "nothing page-locked")),
        (
            {**NO_DEVICE, "call": PIN, "sticky": True},
            ("(100 cudaErrorNoDevice)", "cannot be used at all", "on the CPU"),
        ),
    ],
    ids=["a budget", "pinning alone is refused", "everything is refused"],
)
def test_the_first_report_s_refusal_is_told_as_what_it_is(
    model: OpenModel,
    answer: list[bytes],
    fault: dict[str, Any],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """ "cannot pin 322 MiB: no CUDA-capable device is detected"; it can be three things."""
    it, plan = simulated_plan(model, machine_file("seed-000-budget-exhausted"), OPTIONS, faults=(Fault(**fault),))
    with loaded(model, plan, it) as engine:
        assert generated(engine, PROMPT) == answer
        assert engine.plan.planned_bytes(Tier.PINNED) == 0
    said = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in said


def test_a_refusal_that_no_plan_survives_says_all_there_is_to_know(model: OpenModel) -> None:
    it, plan = simulated_plan(
        model, machine_file("seed-000-budget-exhausted"), OPTIONS, faults=(Fault(call=MALLOC, nth=2, **FULL),)
    )
    with pytest.raises(AllocationFailed) as caught:
        loaded(model, plan, it)
    for word in ('"head"', "cudaMalloc", "(2 cudaErrorMemoryAllocation)", "free by", "WSL2", "no plan fits"):
        assert word in caught.value.found
    assert "--vram-budget" not in caught.value.remedy


def test_blocks_are_the_real_thing() -> None:
    """The counting blocks of these tests stand for `HostBlock`."""
    assert isinstance(CountedBlock(4096)._block, HostBlock)
    CountedBlock.alive -= 1
