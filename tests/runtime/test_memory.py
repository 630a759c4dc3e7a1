"""PlannedMemory: nothing outside the plan, and nothing left behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor.plan import Reservation, Tier
from strata.errors import AllocationFailed, PlanViolation
from strata.runtime import memory as memory_module
from strata.runtime.memory import (
    ALIGNMENT,
    AllocationLog,
    Block,
    MemoryRefused,
    PlannedMemory,
    allocation_event,
    take_host,
)
from strata.runtime.process_memory import anonymous_bytes

from .counted import CountedBlock
from .plans import plan_of, reservation

MIB = 1 << 20


@given(
    nbytes=st.integers(1, 1 << 14),
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 24), max_size=3), st.sampled_from(["u1", "f2", "f4", "i8"])), max_size=24
    ),
)
@settings(max_examples=100, deadline=None)
def test_arrays_are_aligned_disjoint_and_never_exceed_the_line(
    nbytes: int, requests: list[tuple[list[int], str]]
) -> None:
    with PlannedMemory(plan_of(reservation("line", nbytes))) as memory:
        arrays = []
        for shape, dtype in requests:
            asked = math.prod(shape) * np.dtype(dtype).itemsize
            left = memory.left("line")
            try:
                array = memory.array("line", shape, dtype, name="it")
            except PlanViolation as violation:
                refused = str(violation)
                assert asked + ALIGNMENT > left
                assert f'"line": {asked} bytes were asked for' in refused
                continue
            assert array.shape == tuple(shape)
            assert array.dtype == np.dtype(dtype)
            assert array.ctypes.data % ALIGNMENT == 0
            arrays.append(array)
            array.fill(len(arrays))
        assert sum(a.nbytes for a in arrays) <= nbytes
        assert memory.left("line") >= 0
        for number, array in enumerate(arrays, start=1):
            assert (array == number).all()  # no later array wrote over it
        assert memory.allocated_bytes() in (0, nbytes)


LINES = ("dense", "head", "kv_cache", "experts_pinned", "experts_file")


@given(
    lines=st.dictionaries(st.sampled_from(LINES), st.tuples(st.integers(0, 4096), st.sampled_from(Tier))),
    requests=st.lists(st.tuples(st.sampled_from(LINES), st.integers(0, 5000)), max_size=16),
)
@settings(max_examples=200, deadline=None)
def test_whatever_is_asked_for_nothing_is_given_beyond_the_lines_of_the_plan(
    lines: dict[str, tuple[int, Tier]], requests: list[tuple[str, int]]
) -> None:
    plan = plan_of(*(reservation(id, nbytes, tier) for id, (nbytes, tier) in lines.items()))
    taken: dict[str, int] = {}  # bytes spent of each line that memory was taken for
    with PlannedMemory(plan) as memory:
        for line, asked in requests:
            nbytes, tier = lines.get(line, (0, Tier.FILE))
            pinned = any(lines[each][1] is Tier.PINNED for each in taken)
            there = line in taken or (nbytes > 0 and tier is not Tier.FILE and not (tier is Tier.VRAM and pinned))
            start = -(-taken.get(line, 0) // ALIGNMENT) * ALIGNMENT
            if there:
                taken.setdefault(line, 0)
            if there and start + asked <= nbytes:
                assert memory.array(line, (asked,), "u1", name="it").nbytes == asked
                taken[line] = start + asked
            else:
                with pytest.raises(PlanViolation, match=f'"{line}"'):
                    memory.array(line, (asked,), "u1", name="it")
            for tier in Tier:
                assert memory.allocated_bytes(tier) == sum(lines[each][0] for each in taken if lines[each][1] is tier)
                assert memory.allocated_bytes(tier) <= plan.planned_bytes(tier)


def test_a_line_that_the_plan_lacks_is_a_violation() -> None:
    with PlannedMemory(plan_of(reservation("head", 64))) as memory:
        with pytest.raises(PlanViolation, match="the plan has no such line"):
            memory.array("draft", (1,), "f4", name="draft layer")
        assert memory.allocated_bytes() == 0


def test_a_line_in_the_file_has_no_memory() -> None:
    lines = plan_of(reservation("expert_store_file", 64, Tier.FILE))
    with PlannedMemory(lines) as memory, pytest.raises(PlanViolation, match="has no memory"):
        memory.array("expert_store_file", (1,), "f4", name="experts")


def test_device_memory_after_pinning_is_a_violation() -> None:
    lines = plan_of(reservation("pin", 64, Tier.PINNED), reservation("head", 64, Tier.VRAM))
    with PlannedMemory(lines) as memory:
        memory.array("pin", (1,), "f4", name="slice")
        with pytest.raises(PlanViolation, match="after memory was pinned"):
            memory.array("head", (1,), "f4", name="head")


@pytest.mark.parametrize(
    ("refusal", "logged"),
    [
        (MemoryError("no more"), {"code": "MemoryError: no more"}),
        (
            MemoryRefused("cudaMalloc", 2, "cudaErrorMemoryAllocation", "out of memory", free_bytes=512),
            {
                "code": "cudaMalloc: out of memory (2 cudaErrorMemoryAllocation)",
                "call": "cudaMalloc",
                "number": 2,
                "name": "cudaErrorMemoryAllocation",
                "free_bytes": 512,
            },
        ),
    ],
)
def test_a_refusal_names_the_line_and_is_logged(refusal: MemoryError, logged: dict[str, object]) -> None:
    def refuse_head(line: Reservation) -> Block:
        if line.id == "head":
            raise refusal
        return CountedBlock(line.bytes)

    events: list[dict[str, object]] = []
    lines = plan_of(reservation("dense", 64, Tier.VRAM), reservation("head", 1024, Tier.VRAM))
    log: AllocationLog = lambda line, why: events.append(allocation_event(line, why))  # noqa: E731
    with PlannedMemory(lines, take=refuse_head, log=log) as memory:
        memory.array("dense", (4,), "f4", name="norm")
        with pytest.raises(AllocationFailed) as caught:
            memory.array("head", (4,), "f4", name="head")
    assert (caught.value.line, caught.value.nbytes) == ("head", 1024)
    assert str(refusal) in caught.value.found
    assert events == [
        {"line": "dense", "tier": "vram", "bytes": 64, "code": "ok"},
        {"line": "head", "tier": "vram", "bytes": 1024, **logged},
    ]
    assert CountedBlock.alive == 0


def test_taken_memory_is_really_there_and_freed_memory_is_gone_even_while_a_view_lives() -> None:
    before = anonymous_bytes()
    memory = PlannedMemory(plan_of(reservation("slots", 64 * MIB, Tier.VRAM)))
    view = memory.array("slots", (4,), "f4", name="first of many")
    view[:] = 7
    taken = anonymous_bytes() - before
    assert 64 * MIB <= taken < 72 * MIB
    report = memory.report(actual_bytes=taken, peak_bytes=taken + 1)
    assert (report.planned_bytes, report.allocated_bytes, report.actual_bytes) == (64 * MIB, 64 * MIB, taken)
    assert report.difference_bytes == 64 * MIB - taken - 1
    memory.free()
    assert anonymous_bytes() - before < 8 * MIB
    assert memory.allocated_bytes() == 0
    assert view.sum() in (0, 28)  # worthless, but no crash


def test_an_interrupt_while_memory_is_touched_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.steps = array, 0

        def __setitem__(self, key: slice, value: int) -> None:
            self.steps += 1
            if self.steps == 3:
                raise KeyboardInterrupt
            self.array[key] = value

    monkeypatch.setattr(memory_module, "_TOUCH_STEP", 8 * MIB)
    frombuffer = np.frombuffer
    monkeypatch.setattr(np, "frombuffer", lambda buffer, dtype: Interrupting(frombuffer(buffer, dtype)))
    before = anonymous_bytes()
    memory = PlannedMemory(plan_of(reservation("slots", 64 * MIB)))
    with pytest.raises(KeyboardInterrupt):
        memory.array("slots", (1,), "f4", name="first")
    assert anonymous_bytes() - before < 4 * MIB
    assert memory.allocated_bytes() == 0


def test_host_memory_too_large_to_map_is_a_refusal() -> None:
    with PlannedMemory(plan_of(reservation("slots", 1 << 62)), take=take_host) as memory:
        with pytest.raises(AllocationFailed) as caught:
            memory.array("slots", (1,), "f4", name="first")
        assert caught.value.line == "slots"
