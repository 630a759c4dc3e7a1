"""Sharing out work: everything runs once, the first error comes back, and nothing runs on after it."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest

from strata.kernels.workers import WORTH_A_THREAD, Workers


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("multiplications", [0, WORTH_A_THREAD])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_every_task_runs_once(threads: int, multiplications: int, count: int) -> None:
    ran: list[int] = []
    for _ in range(3):
        Workers(threads).run([lambda worker, i=i: ran.append(i) for i in range(count)], multiplications)
    assert sorted(ran) == sorted([*range(count)] * 3)


def test_workers_share_and_have_numbers_of_their_own() -> None:
    both = threading.Barrier(2, timeout=10)  # passed only when two workers are in a task at the same time
    numbers: list[int] = []

    def task(worker: int) -> None:
        numbers.append(worker)
        both.wait()

    Workers(2).run([task, task], WORTH_A_THREAD)
    assert sorted(numbers) == [0, 1]


def test_little_work_wakes_nobody() -> None:
    numbers: list[int] = []
    Workers(4).run([numbers.append] * 50, WORTH_A_THREAD - 1)
    assert numbers == [0] * 50


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_waits_for_the_others_and_stops_the_rest(failing: int) -> None:
    workers = Workers(2)
    both = threading.Barrier(2, timeout=10)
    log: list[str] = []

    def task(worker: int) -> None:
        both.wait()
        if worker == failing:
            raise MemoryError("no more")
        time.sleep(0.2)
        log.append("ended")

    with pytest.raises(MemoryError, match="no more"):
        workers.run([task, task, *[lambda worker: log.append("never")] * 50], WORTH_A_THREAD)
    held = list(log)
    assert held[0] == "ended"  # the other worker was waited for, whichever failed
    assert held.count("never") <= 1 if failing else "never" not in held[1:]
    time.sleep(0.1)
    assert log == held
    workers.run([lambda worker: log.append("again")] * 4, WORTH_A_THREAD)  # and they still work
    assert log[len(held) :] == ["again"] * 4


def test_ctrl_c_waits_for_the_helpers() -> None:
    workers = Workers(2)
    both = threading.Barrier(2, timeout=10)
    log: list[str] = []

    def task(worker: int) -> None:
        both.wait()
        if worker == 0:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        log.append(f"ended {worker}")

    with pytest.raises(KeyboardInterrupt):
        workers.run([task, task], WORTH_A_THREAD)
    assert log == ["ended 1"]


def test_threads_end_with_their_workers() -> None:
    before = set(threading.enumerate())
    workers = Workers(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del workers
    gc.collect()
    for helper in helpers:
        helper.join(timeout=10)
        assert not helper.is_alive()
