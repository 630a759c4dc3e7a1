from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from strata.doctor import gather as module
from strata.doctor.facts import (
    CudaDevice,
    CudaFacts,
    Facts,
    HostFacts,
    PinnedFacts,
    Probe,
    ProbeError,
    ProbeStatus,
)
from strata.doctor.gather import GROUPS, QUICK_PIN_BYTES, GatherOptions, GatherWatch, gather, pinned_limit_s
from strata.doctor.probes.libraries import search_cuda
from strata.doctor.probes.request import ProbeRequest
from strata.doctor.probes.runner import KILL_GRACE_S, Job

GIB = 1 << 30
NO_GPU = pytest.mark.skipif(bool(search_cuda()), reason="this machine has an NVIDIA driver")
HOST = HostFacts(ram_available_bytes=32 * GIB)
CUDA = CudaFacts(devices=(CudaDevice(ordinal=0), CudaDevice(ordinal=1, error=ProbeError("busy", 46))))


class FakeChildren:
    """Stands in for `run_jobs`: answers each group in turn, and remembers what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, list[Any]] = {
            group: answer if isinstance(answer, list) else [answer] for group, answer in answers.items()
        }
        self.waves: list[list[str]] = []
        self.requests: dict[str, list[ProbeRequest]] = {}
        self.limits: dict[str, float] = {}

    def __call__(
        self, jobs: Sequence[Job], on_done: Callable[[str, Any], None], on_state: Callable[[str, Any], None] | None
    ) -> dict[str, Probe[Any]]:
        self.waves.append([job.group for job in jobs])
        outcomes = {}
        for job in jobs:
            self.requests.setdefault(job.group, []).append(msgspec.json.decode(job.request, type=ProbeRequest))
            self.limits[job.group] = job.time_limit_s
            answer = self.answers[job.group].pop(0) if job.group in self.answers else GROUPS[job.group]()
            outcome = answer if isinstance(answer, Probe) else Probe(status=ProbeStatus.OK, value=answer)
            if outcome.value is not None:
                plain = msgspec.json.decode(msgspec.json.encode(outcome.value))
                outcome = msgspec.structs.replace(outcome, value=plain)
            outcomes[job.group] = outcome
            on_done(job.group, outcome)
        return outcomes


def run(monkeypatch: pytest.MonkeyPatch, children: FakeChildren, **options: Any) -> Facts:
    monkeypatch.setattr(module, "run_jobs", children)
    return gather(GatherOptions(**options))


def test_driver_is_asked_before_any_context_and_pins_and_speeds_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren(host=HOST, cuda=CUDA)
    run(monkeypatch, children, model=Path("/m.gguf"))
    assert [wave for wave in children.waves if wave] == [
        ["host", "nvml", "adapters", "disk"],
        ["cuda"],
        ["pinned"],
        ["speed"],
    ]


def test_quick_pin_is_small_and_a_share_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, asked in ((64 * GIB, QUICK_PIN_BYTES), (4 * GIB, GIB)):
        children = FakeChildren(host=HostFacts(ram_available_bytes=available), cuda=CUDA)
        run(monkeypatch, children)
        assert children.requests["pinned"][0].pin_bytes == asked


def test_container_limit_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostFacts(
        ram_available_bytes=64 * GIB,
        cgroup_limit_bytes=8 * GIB,
        cgroup_used_bytes=7 * GIB,
        cgroup_reclaimable_bytes=3 * GIB,
    )
    children = FakeChildren(host=host, cuda=CUDA)
    run(monkeypatch, children)
    assert children.requests["pinned"][0].pin_bytes == GIB


def test_deep_pin_goes_to_the_models_need_but_never_over_the_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren(host=HOST, cuda=CUDA)
    run(monkeypatch, children, deep_pin_bytes=20 * GIB, ballast_bytes=GIB)
    assert children.requests["pinned"][0].pin_bytes == 20 * GIB
    assert children.requests["pinned"][0].ballast_bytes == GIB
    assert children.limits["pinned"] > 60
    children = FakeChildren(host=HOST, cuda=CUDA)
    run(monkeypatch, children, deep_pin_bytes=900 * GIB)
    assert children.requests["pinned"][0].pin_bytes == int(32 * GIB * 0.9)


def test_unknown_memory_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Probe(status=ProbeStatus.TIMED_OUT, error=ProbeError("slow"))
    children = FakeChildren(host=failed, cuda=CUDA)
    run(monkeypatch, children)
    assert children.requests["pinned"][0].pin_bytes == 0


@pytest.mark.parametrize(
    ("cuda", "device", "reason"),
    [
        (Probe(status=ProbeStatus.FAILED, error=ProbeError("no device", 100)), 0, "no device"),
        (Probe(status=ProbeStatus.TIMED_OUT, value=CUDA, error=ProbeError("no answer")), 0, "no answer"),
        (CUDA, 1, "device 1 cannot be used: busy"),
        (CUDA, 7, "CUDA shows no device 7"),
    ],
)
def test_without_a_usable_device_nothing_is_pinned_and_the_speed_probe_is_told(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, device: int, reason: str
) -> None:
    children = FakeChildren(host=HOST, cuda=cuda)
    facts = run(monkeypatch, children, device=device)
    assert "pinned" not in children.requests
    assert facts.pinned.status is ProbeStatus.SKIPPED
    assert facts.pinned.error is not None
    assert reason in facts.pinned.error.message
    told = children.requests["speed"][0].cuda_missing
    assert told is not None
    assert reason in told


@pytest.mark.parametrize("status", [ProbeStatus.TIMED_OUT, ProbeStatus.CRASHED, ProbeStatus.UNSUPPORTED])
def test_cuda_probes_leave_a_broken_nvml_alone(monkeypatch: pytest.MonkeyPatch, status: ProbeStatus) -> None:
    children = FakeChildren(host=HOST, cuda=CUDA, nvml=Probe(status=status, error=ProbeError("it hangs")))
    run(monkeypatch, children)
    for group in ("cuda", "speed"):
        assert children.requests[group][0].nvml_missing == "the nvml probe did not succeed: it hangs"
    children = FakeChildren(host=HOST, cuda=CUDA)
    run(monkeypatch, children)
    assert children.requests["cuda"][0].nvml_missing is None


BOTH_REFUSED = PinnedFacts(
    asked_bytes=GIB,
    refusal=ProbeError("no device", 100),
    malloc_after_refusal_ok=False,
    malloc_refusal=ProbeError("no device", 100),
)


@pytest.mark.parametrize(
    ("second", "works"),
    [
        (PinnedFacts(granted_bytes=64 << 20), True),
        (BOTH_REFUSED, False),
        (Probe(status=ProbeStatus.CRASHED, error=ProbeError("killed by SIGSEGV")), False),
    ],
)
def test_fresh_process_gives_a_second_opinion_when_both_were_refused(
    monkeypatch: pytest.MonkeyPatch, second: Any, works: bool
) -> None:
    children = FakeChildren(host=HOST, cuda=CUDA, pinned=[BOTH_REFUSED, second])
    facts = run(monkeypatch, children)
    assert facts.pinned.value is not None
    assert facts.pinned.value.fresh_process_ok is works
    assert facts.pinned.value.refusal == BOTH_REFUSED.refusal
    assert [request.pin_bytes for request in children.requests["pinned"]] == [2 * GIB, 64 << 20]


def test_budget_needs_no_second_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = PinnedFacts(granted_bytes=GIB, refusal=ProbeError("out of memory", 2), malloc_after_refusal_ok=True)
    children = FakeChildren(host=HOST, cuda=CUDA, pinned=budget)
    facts = run(monkeypatch, children)
    assert len(children.requests["pinned"]) == 1
    assert facts.pinned.value == budget


def test_groups_that_were_not_asked_for_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren(host=HOST)
    facts = run(monkeypatch, children, groups=("host", "pinned"))
    assert facts.host.status is ProbeStatus.OK
    assert facts.pinned.status is ProbeStatus.OK  # nothing is known against the device
    for group in set(GROUPS) - {"host", "pinned"}:
        probe = getattr(facts, group)
        assert (probe.status, probe.error) == (ProbeStatus.SKIPPED, ProbeError("this group was not asked for"))


def test_result_of_another_shape_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module,
        "run_jobs",
        lambda jobs, on_done, on_state: {job.group: Probe(status=ProbeStatus.OK, value={"os": 5}) for job in jobs},
    )
    facts = gather(GatherOptions(groups=("host",)))
    assert facts.host.status is ProbeStatus.CRASHED
    assert facts.host.error is not None
    assert "could not be read" in facts.host.error.message


@NO_GPU
def test_this_machine_without_a_gpu(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * (5 << 20))
    ended: dict[str, ProbeStatus] = {}
    facts = gather(GatherOptions(model=model), GatherWatch(ended=ended.__setitem__))
    assert facts.host.value is not None
    assert facts.host.value.ram_total_bytes == psutil.virtual_memory().total
    assert facts.nvml.status is ProbeStatus.UNSUPPORTED
    assert facts.nvml.error is not None
    assert "no NVIDIA driver" in facts.nvml.error.message
    assert facts.cuda.status is ProbeStatus.UNSUPPORTED
    assert facts.cuda.error is not None
    assert facts.cuda.value is not None  # what is installed is known all the same
    assert facts.pinned.status is ProbeStatus.SKIPPED
    assert facts.pinned.error is not None
    assert facts.cuda.error.message in facts.pinned.error.message
    assert facts.disk.value is not None
    assert facts.disk.value.path == str(model)
    assert facts.speed.value is not None
    assert facts.speed.value.ram_read_bytes_per_s
    assert set(ended) == {"host", "nvml", "adapters", "disk", "cuda", "speed"}
    assert facts.taken_at is not None


def test_parent_never_imports_what_could_make_a_context() -> None:
    code = (
        "import sys, strata.doctor.gather as g\ng.gather(g.GatherOptions(groups=('adapters',)))\n"
        "print([n for n in ('cupy', 'pynvml', 'numpy', 'psutil', 'strata.doctor.probes.cuda') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.bench
@NO_GPU
@pytest.mark.bench
def test_the_quick_doctor_takes_under_three_seconds_without_a_gpu() -> None:
    """The median of five runs of the whole command, its start included; 15 seconds with a GPU."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "strata", "doctor", "--json"], stdout=subprocess.PIPE, check=False)
        seconds.append(time.perf_counter() - started)
    facts = msgspec.convert(msgspec.json.decode(done.stdout)["facts"], Facts, str_keys=True)
    devices = facts.cuda.value.devices if facts.cuda.value else ()
    print(f"\nstrata doctor: median {sorted(seconds)[2]:.2f} s of", ", ".join(f"{s:.2f}" for s in seconds))
    assert sorted(seconds)[2] < (15.0 if devices else 3.0)


def test_the_slowest_driver_holds_it_up_for_less_than_three_minutes() -> None:
    """As the help promises: the first wave runs side by side, a pin may be tried again in a fresh process."""
    limits = module.TIME_LIMITS_S
    first = max(limits[group] for group in ("host", "nvml", "adapters", "disk"))
    pins = pinned_limit_s(QUICK_PIN_BYTES) + pinned_limit_s(module.SECOND_PIN_BYTES)
    rounds = [first, limits["cuda"], pins, limits["speed"]]
    assert sum(rounds) + 5 * KILL_GRACE_S < 180
    assert set(GROUPS) == set(limits)


def test_what_runs_and_for_how_long_at_most_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[list[str], float]] = []
    monkeypatch.setattr(module, "run_jobs", FakeChildren(host=HOST, cuda=CUDA))
    gather(GatherOptions(), GatherWatch(started=lambda groups, limit: told.append((list(groups), limit))))
    assert [groups for groups, _ in told] == [["host", "nvml", "adapters"], ["cuda"], ["pinned"], ["speed"]]
    assert all(limit >= max(module.TIME_LIMITS_S[group] for group in groups) for groups, limit in told)


@pytest.mark.parametrize(
    ("gpu", "ordinal"), [(None, 0), ("0", 1), ("1", 0), ("GPU-slow", 1), ("gpu-SLOW", 1), ("7", 0)]
)
def test_the_gpu_that_is_named_is_the_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, gpu: str | None, ordinal: int
) -> None:
    """CUDA counts the fastest first, nvidia-smi by bus: the wrong card's link would be taken for the other's."""
    fast, slow = (
        CudaDevice(ordinal=n, uuid=f"GPU-{name}", nvml_index=1 - n) for n, name in enumerate(("fast", "slow"))
    )
    children = FakeChildren(host=HOST, cuda=CudaFacts(devices=(fast, slow)))
    run(monkeypatch, children, gpu=gpu)
    assert [children.requests[group][0].device for group in ("pinned", "speed")] == [ordinal, ordinal]
