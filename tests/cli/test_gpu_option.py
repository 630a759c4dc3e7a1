"""Facts are always taken of the GPU that the plan is for: by every command, and again after a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.cli import loading
from strata.cli.bench import BenchRequest, bench_model
from strata.cli.doctor import DoctorRequest, examine
from strata.cli.loading import load
from strata.cli.plan import show_plan
from strata.cli.preflight import OpenModel, open_model
from strata.cli.ram_replan import plan_in_less_ram
from strata.cli.run import RunRequest, run_model
from strata.doctor import gather
from strata.doctor.gather import GatherOptions
from strata.doctor.plan import DeviceRef, PlanOptions
from strata.doctor.plan_io import save_plan
from strata.errors import AllocationFailed
from strata.runtime.memory import MemoryRefused
from strata.runtime.runlog import RunLog
from tests.cli.runner import MODEL
from tests.runtime.plans import planned

SECOND = PlanOptions(gpu="1")


class AskedForError(Exception):
    """Ends a command once it has asked for facts."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """The GPU of each time that facts were asked for."""
    gpus: list[str | None] = []

    def record(options: GatherOptions, watch: Any) -> None:
        gpus.append(options.gpu)
        raise AskedForError

    monkeypatch.setattr(gather, "gather", record)
    monkeypatch.setenv("STRATA_LOG_DIR", str(tmp_path / "logs"))
    return gpus


def run(options: PlanOptions, saved: Path | None = None) -> None:
    run_model(
        RunRequest(
            model=MODEL,
            prompt="a",
            system=None,
            chat=False,
            think=None,
            max_tokens=1,
            temp=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            plan_file=saved,
            json=True,
        ),
        options,
    )


def bench(options: PlanOptions) -> None:
    bench_model(BenchRequest(model=MODEL, prompts="4", tokens=1, depths="0", repetitions=1, seed=0, json=True), options)


def doctor(options: PlanOptions) -> None:
    examine(DoctorRequest(MODEL, None, None, (), (), strict=False, verbose=False, json=True), options)


def plan(options: PlanOptions) -> None:
    show_plan(MODEL, options, output=None, facts_file=None, imagined=None, emit=None, json=True)


@pytest.mark.parametrize("command", [run, bench, doctor, plan])
def test_every_command_measures_with_the_gpu_that_was_named(
    asked: list[str | None], command: Callable[[PlanOptions], None]
) -> None:
    with pytest.raises(AskedForError):
        command(SECOND)
    assert asked == ["1"]


@pytest.fixture
def model() -> Iterator[OpenModel]:
    opened = open_model(MODEL)
    with opened.file:
        yield opened


def test_a_saved_plan_is_checked_with_the_gpu_that_it_was_made_for(
    asked: list[str | None], model: OpenModel, tmp_path: Path
) -> None:
    made = msgspec.structs.replace(planned(model.file), options=SECOND)
    save_plan(made, tmp_path / "plan.json")
    with pytest.raises(AskedForError):
        run(PlanOptions(), tmp_path / "plan.json")
    assert asked == ["1"]


def test_after_a_refusal_the_same_gpu_is_measured_again(
    asked: list[str | None], model: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(model.file)
    on_gpu = msgspec.structs.replace(
        made, options=SECOND, device=DeviceRef(backend="cuda", id="GPU-1", name="the second")
    )
    refusal = AllocationFailed("take", "refused", "", line="head", nbytes=1)
    refusal.__cause__ = MemoryRefused("cudaMalloc", 2, "cudaErrorMemoryAllocation", "out of memory")

    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(loading, "load_once", refuse)
    with RunLog(tmp_path, warn=print) as log:
        with pytest.raises(AskedForError):
            load(model, on_gpu, SECOND, log, quiet=True)
        with pytest.raises(AskedForError):
            plan_in_less_ram(model, on_gpu, refusal, log)
    assert asked == ["1", "1"]
