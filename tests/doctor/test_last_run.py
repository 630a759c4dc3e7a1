"""What a run's log says afterwards."""

import json
from pathlib import Path
from typing import Any

from strata.doctor.facts import ProbeStatus
from strata.doctor.last_run import read_last_run

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
