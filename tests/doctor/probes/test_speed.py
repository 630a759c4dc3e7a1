from __future__ import annotations

import sys

import pytest

from strata.doctor.facts import SpeedFacts
from strata.doctor.probes import speed
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.request import ProbeRequest
from strata.doctor.probes.speed import DeviceCopies, best_rate, collect_device, ram_read, thread_counts
from tests.doctor.probes.fake_cupy import MIB, FakeRuntime, fake_cupy
from tests.doctor.probes.fake_nvml import FakeNvml, rtx4090


def measure(runtime: FakeRuntime, threads: list[int], nvml: FakeNvml | None = None) -> SpeedFacts:
    found = Collector()
    found.values["device_uuid"] = "GPU-00112233-4455-6677-8899-aabbccddeeff"
    collect_device(found, DeviceCopies(runtime, 0, 16 * MIB), threads, NvmlGauge(nvml, "NVML does not start"))
    return SpeedFacts(**found.fields())


@pytest.mark.parametrize(("usable", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 4]), (16, [1, 4, 16])])
def test_thread_counts(usable: int, counts: list[int]) -> None:
    assert thread_counts(usable) == counts


def test_best_rate_is_that_of_the_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 28.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    assert best_rate(100, lambda: None) == 50.0


def test_ram_is_read_by_each_number_of_threads() -> None:
    rates = ram_read(8 * MIB, [1, 2])
    assert list(rates) == [1, 2]
    assert all(rate > 1e8 for rate in rates.values())
    with pytest.raises(Unknown, match="too little RAM"):
        ram_read(0, [1])


def test_every_copy_is_measured_and_the_link_read_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LOADED_S", 0.001)
    card = rtx4090(nvmlDeviceGetCurrPcieLinkGeneration=4)
    facts = measure(FakeRuntime(), [1, 3], FakeNvml(card))
    assert facts.h2d_pinned_bytes_per_s is not None
    assert facts.device_copy_bytes_per_s is not None
    assert list(facts.h2d_pageable_bytes_per_s) == list(facts.h2d_staged_bytes_per_s) == [1, 3]
    assert (facts.pcie_generation_loaded, facts.pcie_width_loaded) == (4, 16)
    assert facts.unknown == {}


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_staged_copies_are_whole(threads: int) -> None:
    runtime = FakeRuntime()
    copies = DeviceCopies(runtime, 0, 7 * MIB)
    pattern = bytes(range(256)) * (copies.nbytes // 256)
    copies._pageable[:] = pattern
    copies.staged(threads)
    part = copies.nbytes // threads * threads
    assert runtime._buffers[copies._on_device].raw[:part] == pattern[:part]


def test_refused_pin_leaves_the_other_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = measure(FakeRuntime(refuse={"hostAlloc": 2}), [1], FakeNvml(rtx4090()))
    assert facts.h2d_pinned_bytes_per_s is None
    assert facts.unknown["h2d_pinned_bytes_per_s"] == "cudaErrorMemoryAllocation 2: out of memory"
    assert facts.h2d_pageable_bytes_per_s[1] > 0
    assert facts.h2d_staged_bytes_per_s == {}
    assert facts.unknown["pcie_width_loaded"] == "nothing could be copied from pinned memory"


def test_little_device_memory_is_left_alone() -> None:
    runtime = FakeRuntime(vram_bytes=32 * MIB)
    assert DeviceCopies(runtime, 0, 256 * MIB).nbytes == 4 * MIB


def test_without_a_device_only_ram_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "import_cupy", lambda packages: pytest.fail("CuPy was imported"))
    (facts,) = speed.probe(ProbeRequest(ram_bytes=4 * MIB, cuda_missing="CuPy is not installed"))
    assert facts.ram_read_bytes_per_s
    assert facts.h2d_pinned_bytes_per_s is None
    assert set(facts.unknown) == set(SpeedFacts.__struct_fields__) - {"ram_read_bytes_per_s", "unknown", "sources"}
    assert set(facts.unknown.values()) == {"CuPy is not installed"}


def test_probe_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "LOADED_S", 0.001)
    monkeypatch.setattr(speed, "import_cupy", lambda packages: fake_cupy(FakeRuntime()))
    first, last = speed.probe(ProbeRequest(ram_bytes=4 * MIB))
    assert first.h2d_pinned_bytes_per_s is None
    assert last.h2d_pinned_bytes_per_s is not None
    assert last.ram_read_bytes_per_s == first.ram_read_bytes_per_s
    assert sys.modules.get("cupy") is None
