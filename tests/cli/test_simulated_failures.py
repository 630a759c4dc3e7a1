"""Whatever a device refuses, loading ends in one re-plan that runs or in a clear refusal, and nothing is left."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from strata.cli.preflight import OpenModel
from strata.cli.simulation import Simulated
from strata.doctor.plan import Tier
from strata.doctor.planner import make_plan
from strata.doctor.units import PAGE
from strata.errors import AllocationFailed
from strata.runtime.engine import Engine
from strata.runtime.memory import HostBlock
from strata.runtime.simulated import HOST_MALLOC, MALLOC, PIN, Fault, SimulatedDevice
from tests.runtime.counted import CountedBlock

from .simulated import (
    FULL,
    ILLEGAL,
    NO_DEVICE,
    NO_RAM,
    OPTIONS,
    PROMPT,
    Events,
    generated,
    is_clear,
    loaded,
    machine_file,
    outcome,
    simulated_plan,
)

pytestmark = pytest.mark.usefixtures("counted")


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
# All is refused though the driver has much free: the GPU does not start. After something was granted it is a budget.
BROKEN_AT_FIRST = "out of memory from then on"
# A pin that is refused is a budget, an odd code that goes away is tried again, and without a GPU there is the CPU. Not
# among them: pins that are granted once and refused the next time, whatever their bytes.
NEVER_REFUSED = BROKEN | {"no device once", "pin refused once", "pins refused for want of a device"}


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
    outcomes = every_outcome(model, answer, kind, machine, "auto", capsys)
    seen = set(outcomes)
    no_pageable = machine.startswith("seed-002") and kind.startswith("RAM")
    assert seen == {"runs"} if no_pageable else seen > {"runs"}
    if kind in BROKEN:
        assert "on the CPU" in seen
        assert "refused" not in seen
    elif not no_pageable:
        assert ("on the CPU" in outcomes[:1]) == (kind == BROKEN_AT_FIRST)
        assert "on the CPU" not in outcomes[1:]
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
