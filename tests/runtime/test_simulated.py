"""The simulated device refuses as recorded machines did: budgets, two truths, couplings, calls by number and size."""

from __future__ import annotations

from typing import Any

import pytest

from strata.doctor.plan import Tier
from strata.runtime.memory import Block, MemoryRefused
from strata.runtime.simulated import MALLOC, PIN, Fault, SimulatedDevice, SimulatedMachine

from .plans import reservation

KIB = 1 << 10
OOM = (2, "cudaErrorMemoryAllocation")
VRAM, PINNED, PAGEABLE = Tier.VRAM, Tier.PINNED, Tier.PAGEABLE


def device(**machine: Any) -> SimulatedDevice:
    """A machine of a few KiB; everything not named is ample."""
    few: dict[str, Any] = {"vram_told_bytes": 1 << 30, "vram_bytes": 1 << 30, "pin_step_bytes": 16 * KIB}
    return SimulatedDevice(SimulatedMachine(**(few | machine)))


def take(it: SimulatedDevice, tier: Tier, kib: int) -> Block:
    return it.take(reservation("line", kib * KIB, tier))


def refused(it: SimulatedDevice, tier: Tier, kib: int) -> MemoryRefused:
    held = it.held_bytes()
    with pytest.raises(MemoryRefused) as caught:
        take(it, tier, kib)
    assert it.held_bytes() == held, "a refusal must cost nothing"
    return caught.value


def test_vram_is_granted_to_the_byte_beside_the_context() -> None:
    it = device(vram_told_bytes=100 * KIB, vram_bytes=100 * KIB, context_bytes=20 * KIB)
    head = take(it, VRAM, 80)
    refusal = refused(it, VRAM, 1)
    assert (refusal.code, refusal.name) == OOM
    assert (refusal.call, refusal.free_bytes, refusal.broken) == (MALLOC, 0, False)
    head.release()
    assert it.held_bytes() == 20 * KIB
    take(it, VRAM, 80).release()


def test_the_driver_may_grant_less_than_it_tells() -> None:
    it = device(vram_told_bytes=100 * KIB, vram_bytes=60 * KIB)
    assert refused(it, VRAM, 61).free_bytes == 100 * KIB
    take(it, VRAM, 60).release()


def test_what_someone_else_took_is_told_of_and_gone() -> None:
    it = device(vram_told_bytes=100 * KIB, vram_bytes=100 * KIB, vram_taken_bytes=30 * KIB)
    assert refused(it, VRAM, 71).free_bytes == 70 * KIB
    take(it, VRAM, 70).release()


def test_pinning_goes_in_steps_until_the_first_refusal() -> None:
    it = device(pinned_bytes=40 * KIB)
    refusal = refused(it, PINNED, 100)
    assert (refusal.call, refusal.granted_bytes, it.calls) == (PIN, 32 * KIB, 3)
    assert not refusal.broken
    take(it, PINNED, 40).release()


def test_ram_is_one_memory_for_both_host_tiers() -> None:
    it = device(ram_bytes=100 * KIB)
    take(it, PAGEABLE, 60)
    assert (refused(it, PINNED, 41).code, refused(it, PAGEABLE, 41).name) == (2, "ENOMEM")
    take(it, VRAM, 200)
    take(it, PAGEABLE, 40)


def test_vram_of_an_integrated_gpu_is_ram() -> None:
    it = device(ram_bytes=100 * KIB, integrated=True)
    take(it, VRAM, 70)
    assert refused(it, PAGEABLE, 31).free_bytes == 30 * KIB


@pytest.mark.parametrize(
    ("coupling", "pins_after_vram"),
    [({"shared_bytes": 100 * KIB}, 40), ({"registered_bytes": 32 * KIB}, 90), ({"commit_bytes": 100 * KIB}, 40)],
    ids=["one budget", "device memory refused after pins", "commit limit"],
)
def test_each_coupling_refuses_whichever_comes_last(coupling: dict[str, int], pins_after_vram: int) -> None:
    late = device(**coupling)
    take(late, PINNED, 90)
    assert (refused(late, VRAM, 60).code, refused(late, VRAM, 60).broken) == (2, False)
    early = device(**coupling)
    take(early, VRAM, 60)
    take(early, PINNED, pins_after_vram)


@pytest.mark.parametrize(
    ("fault", "granted"),
    [
        (Fault(nth=2, times=1), [True, False, True, True]),
        (Fault(nth=2, times=2), [True, False, False, True]),
        (Fault(nth=3), [True, True, False, False]),
        (Fault(from_bytes=9 * KIB), [True, True, True, True]),
        (Fault(from_bytes=8 * KIB), [False, False, False, False]),
        (Fault(call=PIN), [True, True, True, True]),
        (Fault(nth=2, times=1, code=700, sticky=True), [True, False, False, False]),
    ],
)
def test_a_fault_refuses_the_calls_it_names(fault: Fault, granted: list[bool]) -> None:
    it = device(faults=(fault,))
    seen = []
    for _ in granted:
        try:
            take(it, VRAM, 8)
        except MemoryRefused as refusal:
            seen.append(refusal.code)
        else:
            seen.append(None)
    assert seen == [None if yes else fault.code for yes in granted]


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (Fault(call=PIN, code=100), False),  # only pinning is refused, as a report had it
        (Fault(code=100), True),
        (Fault(code=100, nth=1, times=1), False),
        (Fault(call=PIN, code=700, sticky=True), True),
        (Fault(), False),  # out of memory is a matter of size
    ],
)
def test_a_broken_context_is_told_from_a_budget_by_trying(fault: Fault, broken: bool) -> None:
    assert refused(device(faults=(fault,)), PINNED, 8).broken is broken


def test_out_of_memory_as_the_first_answer_to_anything_is_no_matter_of_size() -> None:
    """As where a limit on address space keeps CUDA from starting; with something held, it is one."""
    assert refused(device(faults=(Fault(),)), VRAM, 8).broken
    assert not refused(device(faults=(Fault(from_bytes=8 * KIB),)), VRAM, 8).broken
    it = device(faults=(Fault(nth=2),))
    take(it, VRAM, 8)
    assert not refused(it, VRAM, 8).broken


def test_a_broken_context_leaves_ordinary_ram_alone() -> None:
    it = device(faults=(Fault(code=700, sticky=True),))
    refused(it, VRAM, 8)
    take(it, PAGEABLE, 8).release()


def test_this_machine_s_own_refusal_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> Block:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("strata.runtime.simulated.HostBlock", none_left)
    it = device()
    with pytest.raises(OSError, match="Cannot allocate"):
        take(it, VRAM, 8)
    assert it.held_bytes() == 0
