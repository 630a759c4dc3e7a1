"""What a run's log says afterwards."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.doctor.checks.registry import find_check
from strata.doctor.facts import ProbeStatus, RunFacts
from strata.doctor.findings import Status
from strata.doctor.last_run import read_last_run
from strata.doctor.plan import AllocationPlan, Reservation, Tier
from strata.errors import KernelError
from strata.runtime.generation import GenerationStats, StopReason
from strata.runtime.memory import MemoryRefused, allocation_event
from strata.runtime.process_memory import MemoryReport, TierMemory
from strata.runtime.runlog import RunLog, run_logs
from tests.doctor.machines import cases
from tests.runtime.plans import plan_of, reservation

PLAN = {"event": "plan", "plan": {"model": {"name": "m"}, "options": {}, "device": {"backend": "cuda"}}}
REFUSED = {
    "event": "allocation",
    "line": "head",
    "tier": "vram",
    "bytes": 521472000,
    "code": "CUDARuntimeError: cudaErrorMemoryAllocation: out of memory",
}


def generation(tokens: int, seconds: float) -> dict[str, Any]:
    return {"event": "generation", "stats": {"decode_tokens": tokens, "decode_s": seconds}, "memory": {"tiers": []}}


def log(folder: Path, number: int, *events: dict[str, Any], tail: str = "") -> Path:
    path = folder / f"run-{number}.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return path


def test_no_log_is_no_run() -> None:
    assert read_last_run([]).status is ProbeStatus.SKIPPED


def test_a_refused_allocation(tmp_path: Path) -> None:
    ok = {**REFUSED, "line": "dense", "code": "ok"}
    error = {"event": "error", "type": "AllocationFailed", "message": "load: the memory was refused."}
    run = read_last_run([log(tmp_path, 1, PLAN, ok, REFUSED, error, tail='{"event": "cut')]).value
    assert run
    assert run.refusal
    assert (run.refusal.code, run.refusal.name) == (2, "cudaErrorMemoryAllocation")
    assert run.refusal.call == "allocating head (497.3 MiB)"
    assert run.refused_line == "head"
    assert run.error == "load: the memory was refused."


def test_a_call_outside_any_allocation(tmp_path: Path) -> None:
    error = {"event": "error", "message": "cudaErrorIllegalAddress: an illegal memory access", "call": "cuLaunchKernel"}
    run = read_last_run([log(tmp_path, 1, PLAN, error)]).value
    assert run
    assert run.refusal
    assert (run.refusal.code, run.refusal.call, run.refused_line) == (700, "cuLaunchKernel", None)


def test_a_second_plan_that_held_is_no_refusal(tmp_path: Path) -> None:
    tiers = [{"tier": "pinned", "planned_bytes": 11, "allocated_bytes": 16}]
    loaded = {"event": "loaded", "memory": {"tiers": tiers}}
    run = read_last_run([log(tmp_path, 1, PLAN, REFUSED, PLAN, loaded)]).value
    assert run
    assert run.refusal is None
    assert (run.planned_pinned_bytes, run.actual_pinned_bytes) == (11, 16)


def test_the_usual_speed_is_that_of_the_same_model_and_options(tmp_path: Path) -> None:
    other = {"event": "plan", "plan": {"model": {"name": "other"}, "options": {}}}
    logs = [
        log(tmp_path, 4, PLAN, generation(137, 10.0)),
        log(tmp_path, 3, other, generation(900, 1.0)),
        log(tmp_path, 2, PLAN, generation(1020, 10.0)),
        tmp_path / "run-1.jsonl",  # removed meanwhile
    ]
    run = read_last_run(logs).value
    assert run
    assert (run.decode_tokens_per_s, run.usual_decode_tokens_per_s) == (13.7, 102.0)


def test_a_log_of_nonsense_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run-1.jsonl"
    path.write_bytes(b'\xff\xfe\n[1, 2]\n"text"\nnull\n{"event": "generation"}\n{"event": "plan", "plan": null}\n')
    probe = read_last_run([path])
    assert probe.status is ProbeStatus.OK
    assert probe.value
    assert probe.value.decode_tokens_per_s is None


def test_a_log_that_cannot_be_read_is_a_failed_probe(tmp_path: Path) -> None:
    probe = read_last_run([tmp_path / "gone.jsonl"])
    assert probe.status is ProbeStatus.FAILED


MIB, GIB = 1 << 20, 1 << 30
HEAD = reservation("head", 497 * MIB, Tier.VRAM)
PLANNED = 12 * GIB


def plan_for_a_gpu() -> AllocationPlan:
    plan = plan_of(HEAD)
    return msgspec.structs.replace(plan, device=msgspec.structs.replace(plan.device, backend="cuda"))


def memory(free: int = 2 * GIB, taken: int = 11 * GIB, pinned: tuple[int, int] = (GIB, GIB)) -> MemoryReport:
    """Return what a loaded run on a GPU reports of its memory."""
    tiers = (TierMemory(Tier.VRAM, PLANNED, PLANNED - MIB), TierMemory(Tier.PINNED, *pinned))
    return MemoryReport(
        tiers=tiers,
        planned_bytes=PLANNED + pinned[0],
        allocated_bytes=PLANNED - MIB + pinned[1],
        actual_bytes=GIB,
        peak_bytes=GIB,
        vram_taken_bytes=taken,
        vram_free_bytes=free,
    )


def answered(seconds: float) -> GenerationStats:
    return GenerationStats(
        reused_tokens=0,
        prefill_tokens=8,
        prefill_misses=0,
        prefill_s=1.0,
        generated_tokens=101,
        decode_tokens=100,
        decode_s=seconds,
        hit_rate=1.0,
        hits=1,
        misses=0,
        evictions=0,
        filled_bytes={},
        stop=StopReason.LENGTH,
    )


class CUDADriverError(RuntimeError):
    """As CuPy's: its text is the code's name and string."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def launchKernel() -> None:
    check_status(2, "CUDA_ERROR_OUT_OF_MEMORY: out of memory")


def streamSynchronize() -> None:
    check_status(700, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")


def malloc() -> None:
    check_status(2, "cudaErrorMemoryAllocation: out of memory")


def check_status(status: int, text: str) -> None:
    raise CUDADriverError(status, text)


Story = Callable[[RunLog], None]


def refused(line: Reservation, refusal: MemoryRefused) -> Story:
    return lambda log: log.event("allocation", **allocation_event(line, refusal))


def loaded(**figures: Any) -> Story:
    return lambda log: log.event("loaded", memory=memory(**figures))


def generated(seconds: float) -> Story:
    return lambda log: log.event("generation", stats=answered(seconds), memory=memory())


def broken(call: Callable[[], None]) -> Story:
    def fail(log: RunLog) -> None:
        try:
            call()
        except RuntimeError as error:
            raise KernelError("run a kernel", "the driver refused", "Send us: strata report") from error

    return fail


def told_by(folder: Path, *runs: list[Story]) -> RunFacts:
    """Write the log of each run, oldest first, as a run writes it, and read the last."""
    for stories in runs:
        try:
            with RunLog(folder, warn=pytest.fail) as log:
                log.event("plan", plan=plan_for_a_gpu())
                for story in stories:
                    story(log)
        except KernelError:
            continue
    found = read_last_run(run_logs(folder)).value
    assert found
    return found


def zero_bytes() -> Story:
    refusal = MemoryRefused("cudaHostRegister", 1, "cudaErrorInvalidValue", "invalid argument")
    return refused(reservation("experts.pinned", 0, Tier.PINNED), refusal)


def lock_refused() -> Story:
    refusal = MemoryRefused("VirtualLock", 1314, "ERROR_PRIVILEGE_NOT_HELD", "A required privilege is not held")
    return refused(reservation("experts.pageable", GIB, Tier.PAGEABLE), refusal)


def large_pin() -> Story:
    refusal = MemoryRefused("cudaHostRegister", 2, "cudaErrorMemoryAllocation", "out of memory", free_bytes=9 * GIB)
    return refused(reservation("experts.pinned", 47 * GIB, Tier.PINNED), refusal)


def no_room_for_the_head() -> Story:
    return refused(HEAD, MemoryRefused("cudaMalloc", 2, "cudaErrorMemoryAllocation", "out of memory"))


LINUX, WINDOWS = "desktop-4070tis", "seed-002-no-desktop"


@pytest.mark.parametrize(
    ("check", "machine", "runs", "near_miss"),
    [
        (
            "STR-PIN-LATCHED",
            LINUX,
            [[loaded(free=3 * GIB), broken(launchKernel)]],
            [[loaded(free=MIB), broken(launchKernel)]],
        ),
        ("STR-PIN-CALL", LINUX, [[large_pin(), loaded()]], [[no_room_for_the_head()]]),
        ("STR-PIN-ZERO", LINUX, [[zero_bytes()]], [[large_pin()]]),
        ("STR-PIN-LOCK", WINDOWS, [[lock_refused(), loaded(), generated(1.0)]], [[large_pin(), loaded()]]),
        ("STR-PIN-POOL", LINUX, [[loaded(pinned=(11 * GIB, 16 * GIB))]], [[loaded()]]),
        ("STR-CUDA-STICKY", LINUX, [[loaded(), broken(streamSynchronize)]], [[loaded(), broken(malloc)]]),
        ("STR-VRAM-UNPLANNED", LINUX, [[loaded(), broken(malloc)]], [[no_room_for_the_head()]]),
        ("STR-VRAM-OVERRUN", LINUX, [[loaded(taken=PLANNED + 400 * MIB)]], [[loaded(taken=PLANNED)]]),
        (
            "STR-VRAM-SPILL",
            WINDOWS,
            [[loaded(), generated(1.0)], [loaded(free=40 * MIB), generated(7.5)]],
            [[loaded(), generated(1.0)], [loaded(), generated(7.5)]],
        ),
    ],
)
def test_each_check_of_the_last_run_is_met_by_a_log_as_runs_write_it(
    tmp_path: Path, check: str, machine: str, runs: list[list[Story]], near_miss: list[list[Story]]
) -> None:
    base = cases()[machine].machine()

    def finding(folder: str, stories: list[list[Story]]) -> Status | None:
        run = told_by(tmp_path / folder, *stories)
        probe = msgspec.structs.replace(base.facts.run, status=ProbeStatus.OK, value=run, error=None)
        found = find_check(check).run(type(base)(msgspec.structs.replace(base.facts, run=probe)))
        return found.status if found else None

    assert finding("story", runs) in (Status.WARN, Status.FAIL)
    assert finding("near-miss", near_miss) is Status.PASS


def test_what_a_refusal_says_reaches_the_facts_whole(tmp_path: Path) -> None:
    run = told_by(tmp_path, [large_pin()])
    assert run.refusal
    assert run.refusal.call == "cudaHostRegister(47 GiB)"
    assert (run.refusal.code, run.refusal.name) == (2, "cudaErrorMemoryAllocation")
    assert run.refusal.message == "out of memory, with 9 GiB free"
    assert run.refused_line == "experts.pinned"
    assert run.unknown["actual_vram_bytes"] == "the last run ended before it had loaded"


def test_a_driver_that_did_not_say_is_no_count_of_ours(tmp_path: Path) -> None:
    log_nothing = msgspec.structs.replace(memory(), vram_taken_bytes=None, vram_free_bytes=None)
    run = told_by(tmp_path, [lambda log: log.event("loaded", memory=log_nothing)])
    assert (run.planned_vram_bytes, run.actual_vram_bytes, run.vram_free_loaded_bytes) == (PLANNED, None, None)
    assert run.unknown["actual_vram_bytes"] == "the run's log does not say"


def test_no_event_however_shaped_makes_reading_fail(tmp_path: Path) -> None:
    """Logs are files that people edit, and that other versions write."""
    dice = random.Random(5)
    odd = [None, True, -1, 1e300, "", "x", "cudaErrorNoDevice", [], [[]], [1], {}, {"tiers": [5]}, {"a": {}}]
    names = ["line", "bytes", "code", "call", "number", "name", "free_bytes", "plan", "memory", "stats", "message"]
    kinds = ["plan", "allocation", "loaded", "generation", "error", "replan", 5, None]
    for number in range(300):
        events = [
            {"event": dice.choice(kinds), **{name: dice.choice(odd) for name in dice.sample(names, dice.randrange(9))}}
            for _ in range(6)
        ]
        value = read_last_run([log(tmp_path, number, *events)]).value
        assert value
        assert msgspec.convert(msgspec.to_builtins(value), RunFacts) == value


def test_of_a_long_log_beginning_and_end_are_read(tmp_path: Path) -> None:
    chat = [generation(100, 10.0)] * 90_000  # ten megabytes
    error = {"event": "error", "message": "cudaErrorIllegalAddress: an illegal memory access", "call": "launchKernel"}
    path = log(tmp_path, 1, PLAN, *chat, error)
    assert path.stat().st_size > 8 << 20
    run = read_last_run([path]).value
    assert run
    assert run.refusal
    assert run.refusal.code == 700
    assert run.decode_tokens_per_s == 10.0
    assert run.unknown["vram_free_loaded_bytes"]  # the plan, at the beginning, said that it ran on a GPU
