"""`--deep`: what it decides to take, and that it takes no more, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from strata.doctor import gather as gathering
from strata.doctor.deep import DeepProbe, deep_options, deep_probe, measure
from strata.doctor.facts import CudaDevice, Facts, HostFacts, PinnedFacts, Probe, ProbeError, ProbeStatus
from strata.doctor.invariants import broken
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.probes import pinned
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import LEFT_FREE_BYTES, ProbeRequest, ProbeStopped
from strata.doctor.probes.runner import Job
from strata.errors import Undetermined
from tests.doctor.machines_with_gpus import gpu_machine, rtx_5060_ti_on_windows
from tests.doctor.probes.fake_cupy import FakeRuntime
from tests.doctor.shapes import FLASH_NEXT, GIB, GPT_OSS_20B, MIB, Q3_30B, Q3_235B

CARD = CudaDevice(ordinal=3, uuid="GPU-0", vram_free_bytes=22_500 * MIB, context_bytes=300 * MIB)


def linux(**more: Any) -> Facts:
    return gpu_machine(vram_total=24_564 * MIB, vram_free=23_000 * MIB, ram=60 * GIB, cuda=CARD, **more)


@pytest.mark.parametrize("facts", [linux(), rtx_5060_ti_on_windows(monitor_on_card=False)], ids=["linux", "windows"])
@pytest.mark.parametrize("model", [FLASH_NEXT, Q3_235B, GPT_OSS_20B], ids=lambda model: model.name)
def test_it_takes_what_the_plan_without_pinning_holds_and_no_more_than_a_plan_could_use(
    facts: Facts, model: Any
) -> None:
    probe = deep_probe(facts, model, PlanOptions())
    base = make_plan(facts, model, PlanOptions(device="cuda", pinned_budget_bytes=0))
    context = base.line("context")
    assert context
    assert base.planned_bytes(Tier.PINNED) == 0
    assert probe.ballast_bytes <= base.planned_bytes(Tier.VRAM) - context.bytes
    assert base.planned_bytes(Tier.VRAM) - context.bytes - probe.ballast_bytes <= 64 * MIB  # the rest is a margin
    assert probe.left_free_bytes > LEFT_FREE_BYTES
    unlimited = PinnedFacts(asked_bytes=1 << 42, granted_bytes=1 << 42)
    dream = msgspec.structs.replace(facts, pinned=Probe(status=ProbeStatus.OK, value=unlimited))
    most = make_plan(dream, model, PlanOptions(device="cuda")).planned_bytes(Tier.PINNED)
    assert 0.85 * most <= probe.pin_bytes <= most  # some RAM is left alone while trying


def test_it_says_beforehand_what_it_takes() -> None:
    said = deep_probe(linux(), Q3_235B, PlanOptions()).sentence
    for part in (
        "GiB of page-locked RAM",
        "at most 256 MiB",
        "GeForce RTX 4090",
        "stay free",
        "Ctrl-C",
        " s, and gives",
    ):
        assert part in said


def test_under_wsl2_no_more_is_held_than_the_system_has_ram() -> None:
    """A card larger than the machine behind it: filling it has crashed Windows."""
    card = CudaDevice(ordinal=0, uuid="GPU-0", vram_free_bytes=94 * GIB, context_bytes=300 * MIB)
    facts = gpu_machine(vram_total=96 * GIB, vram_free=95 * GIB, ram=45 * GIB, cuda=card, wsl="wsl2")
    probe = deep_probe(facts, Q3_235B, PlanOptions())
    assert probe.ballast_bytes == 45 * GIB
    assert probe.left_free_bytes > 40 * GIB


def test_a_budget_that_the_person_gives_is_not_exceeded() -> None:
    assert deep_probe(linux(), Q3_235B, PlanOptions(pinned_budget_bytes=GIB)).pin_bytes <= GIB
    small = deep_probe(linux(), Q3_235B, PlanOptions(vram_budget_bytes=12 * GIB))
    assert small.ballast_bytes < 12 * GIB


NO_GPU = msgspec.structs.replace(
    linux(),
    nvml=Probe(status=ProbeStatus.UNSUPPORTED, error=ProbeError("no NVIDIA driver here")),
    cuda=Probe(status=ProbeStatus.UNSUPPORTED, error=ProbeError("CuPy is not installed")),
)
BUSY = CudaDevice(ordinal=0, uuid="GPU-0", error=ProbeError("busy", 46))


@pytest.mark.parametrize(
    ("facts", "model", "options", "why"),
    [
        (NO_GPU, Q3_30B, PlanOptions(), "CuPy is not installed"),
        (linux(), Q3_30B, PlanOptions(device="cpu"), "nothing is page-locked"),
        (
            gpu_machine(vram_total=24 * GIB, vram_free=23 * GIB, ram=60 * GIB, cuda=BUSY),
            Q3_30B,
            PlanOptions(),
            "busy",
        ),
        (gpu_machine(vram_total=24 * GIB, vram_free=23 * GIB, ram=60 * GIB), Q3_30B, PlanOptions(), "does not show"),
        (linux(), Q3_235B, PlanOptions(vram_budget_bytes=GIB), "missing"),
        (linux(), Q3_30B, PlanOptions(pinned_budget_bytes=0), "nothing to measure"),
    ],
)
def test_where_it_cannot_measure_it_says_why(facts: Facts, model: Any, options: PlanOptions, why: str) -> None:
    with pytest.raises(Undetermined) as caught:
        deep_probe(facts, model, options)
    assert why in str(caught.value)


class OnDevice:
    """Stands in for `run_jobs`: the pinned probe runs here, on a simulated device, at a thousandth of the bytes."""

    SCALE = 1024

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.requests: list[ProbeRequest] = []

    def __call__(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[str, Any], None],
        on_state: Callable[[str, Any], None] | None,
    ) -> dict[str, Probe[Any]]:
        return {job.group: self.answer(job) for job in jobs}

    def answer(self, job: Job) -> Probe[Any]:
        if job.group == "host":
            host = HostFacts(ram_available_bytes=60 * GIB)
            return Probe(status=ProbeStatus.OK, value=msgspec.to_builtins(host))
        if job.group != "pinned":
            return Probe(status=ProbeStatus.SKIPPED)
        request = msgspec.json.decode(job.request, type=ProbeRequest)
        self.requests.append(request)
        small = msgspec.structs.replace(
            request, pin_bytes=request.pin_bytes // self.SCALE, ballast_bytes=request.ballast_bytes // self.SCALE
        )
        facts = None
        try:
            for facts in pinned.try_pinning(self.runtime, small, lambda: "GPU-0", NvmlGauge(None)):  # noqa: B007 - the last one counts
                pass
        except ProbeStopped as stop:
            return Probe(status=stop.status, error=stop.error)
        assert facts is not None
        large = {
            name: getattr(facts, name) * self.SCALE
            for name in facts.__struct_fields__
            if name.endswith("_bytes") and getattr(facts, name) is not None
        }
        return Probe(status=ProbeStatus.OK, value=msgspec.to_builtins(msgspec.structs.replace(facts, **large)))


def on_device(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, facts: Facts) -> tuple[Facts, DeepProbe, OnDevice]:
    monkeypatch.setattr(pinned, "LARGE_CHUNK", 256 * 1024)
    monkeypatch.setattr(pinned, "SMALL_CHUNK", 64 * 1024)
    monkeypatch.setattr(pinned, "LEFT_FREE_BYTES", LEFT_FREE_BYTES // OnDevice.SCALE)
    monkeypatch.setattr(pinned, "SCRATCH_BYTES", 16 * 1024)
    monkeypatch.setattr(pinned, "MALLOC_TEST_BYTES", 1024)
    device = OnDevice(runtime)
    monkeypatch.setattr(gathering, "run_jobs", device)
    probe = deep_probe(facts, Q3_235B, PlanOptions())
    return measure(facts, probe), probe, device


def test_a_device_that_grants_all_is_asked_for_the_need_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(vram_bytes=23 * MIB, pinned_bytes=GIB)
    facts, probe, device = on_device(monkeypatch, runtime, linux())
    value = facts.pinned.value
    assert value
    assert device.requests[0].device == 3  # CUDA's number of the card
    assert (device.requests[0].pin_bytes, device.requests[0].ballast_bytes) == (probe.pin_bytes, probe.ballast_bytes)
    assert value.refusal is None
    assert runtime.highest_pinned == probe.pin_bytes // OnDevice.SCALE
    assert value.ballast_bytes == pytest.approx(probe.ballast_bytes, abs=1024)
    plan = make_plan(facts, Q3_235B, deep_options(PlanOptions()))
    assert plan.feasible
    assert plan.planned_bytes(Tier.PINNED) == pytest.approx(probe.pin_bytes, rel=0.01)


def test_the_first_refusal_ends_it_and_the_plan_moves_the_rest_to_pageable_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(vram_bytes=23 * MIB, pinned_bytes=10 * MIB, refusal=208)
    facts, probe, _ = on_device(monkeypatch, runtime, linux())
    value = facts.pinned.value
    assert value
    assert value.refusal
    assert (value.refusal.code, value.malloc_after_refusal_ok) == (208, True)
    assert value.granted_bytes == 10 * GIB < probe.pin_bytes
    assert runtime.calls.count("hostAlloc") == 10 * 4 + 1  # one refusal, and no second try
    plan = make_plan(facts, Q3_235B, deep_options(PlanOptions()))
    assert plan.feasible
    assert 0 < plan.planned_bytes(Tier.PINNED) <= 8 * GIB  # four fifths of what was granted
    assert plan.experts.pageable > 0
    assert broken(plan) == ()


def test_where_one_budget_holds_both_the_ballast_makes_the_refusal_come_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under some Windows drivers page-locked memory and VRAM come out of one budget: only this order shows it."""
    runtime = FakeRuntime(vram_bytes=40 * MIB, pinned_bytes=40 * MIB, shared=True)
    facts, probe, _ = on_device(monkeypatch, runtime, linux())
    value = facts.pinned.value
    assert value
    assert value.refusal
    assert value.granted_bytes + probe.ballast_bytes <= 40 * GIB
    assert value.granted_bytes + probe.ballast_bytes > 40 * GIB - 256 * MIB - 2048 * 1024


def test_a_ballast_that_finds_less_room_than_the_plan_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(vram_bytes=4 * MIB)  # someone else took the card since
    facts, _, _ = on_device(monkeypatch, runtime, linux())
    assert facts.pinned.status is ProbeStatus.FAILED
    assert facts.pinned.error
    assert "ballast" in (facts.pinned.error.call or "")
    assert runtime.highest_pinned == 0
