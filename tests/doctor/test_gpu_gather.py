"""The probes on a real NVIDIA GPU: what they say of one machine must agree with itself."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from strata.doctor.facts import Facts, NvmlGpu, ProbeStatus
from strata.doctor.facts_io import read_facts, write_facts
from strata.doctor.gather import GROUPS, GatherOptions, gather
from strata.doctor.probes.libraries import search_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not search_cuda() or find_spec("cupy") is None, reason="needs an NVIDIA driver and CuPy"),
]

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, float]:
    """Gather once, with a model file of a few blocks, and time it."""
    model = tmp_path_factory.mktemp("model") / "model.gguf"
    model.write_bytes(os.urandom(64 * MIB))
    started = time.monotonic()
    facts = gather(GatherOptions(model=model))
    return facts, time.monotonic() - started


@pytest.fixture(scope="module")
def facts(gathered: tuple[Facts, float]) -> Facts:
    return gathered[0]


def nvml_twin(facts: Facts) -> NvmlGpu:
    assert facts.nvml.value is not None
    assert facts.cuda.value is not None
    uuid = facts.cuda.value.devices[0].uuid
    return next(gpu for gpu in facts.nvml.value.gpus if gpu.uuid == uuid)


def test_every_probe_succeeds_within_the_quick_limit(gathered: tuple[Facts, float]) -> None:
    facts, seconds = gathered
    for group in GROUPS:
        probe = getattr(facts, group)
        assert probe.status is ProbeStatus.OK, (group, probe.error)
    print({group: getattr(facts, group).seconds for group in GROUPS}, f"all: {seconds:.1f} s")
    assert seconds < 60  # the aim is 15 s, on a machine that does nothing else


def test_cuda_and_nvml_see_the_same_card(facts: Facts) -> None:
    assert facts.cuda.value is not None
    device, gpu = facts.cuda.value.devices[0], nvml_twin(facts)
    assert device.nvml_index == gpu.index
    assert (device.name, device.compute_capability) == (gpu.name, gpu.compute_capability)
    assert gpu.pci_bus_id is not None
    assert gpu.vram_total_bytes is not None
    assert gpu.vram_free_bytes is not None
    assert gpu.vram_free_bytes <= gpu.vram_total_bytes
    assert device.vram_total_bytes is not None
    assert device.vram_free_bytes is not None
    assert device.vram_free_bytes <= device.vram_total_bytes <= gpu.vram_total_bytes


def test_kernel_ran_with_what_is_installed(facts: Facts) -> None:
    cuda = facts.cuda.value
    assert cuda is not None
    assert cuda.kernel_ok is True, cuda.kernel_error
    assert cuda.kernel_error is None
    assert cuda.cupy_packages
    assert cuda.nvrtc_max_arch is not None
    major, minor = (cuda.devices[0].compute_capability or "").split(".")
    assert cuda.nvrtc_max_arch >= int(major) * 10 + int(minor)
    assert facts.nvml.value is not None
    assert cuda.driver_version == facts.nvml.value.cuda_driver_version
    assert cuda.libcuda_loaded is not None
    loaded = Path(cuda.libcuda_loaded).resolve()
    assert loaded in [Path(file.target or file.path) for file in cuda.libcuda_candidates]


def test_context_took_memory(facts: Facts) -> None:
    assert facts.cuda.value is not None
    device = facts.cuda.value.devices[0]
    assert device.context_bytes is not None, device.unknown
    assert 50 * MIB < device.context_bytes < 4 * GIB
    assert device.attributes["CanMapHostMemory"] == 1
    assert device.attributes["UnifiedAddressing"] == 1
    assert device.integrated is not None


def test_pinned_memory_was_granted_and_is_intact(facts: Facts) -> None:
    pinned = facts.pinned.value
    assert pinned is not None
    assert facts.cuda.value is not None
    assert 0 < pinned.granted_bytes <= pinned.asked_bytes
    assert pinned.verified is True
    assert pinned.device_uuid == facts.cuda.value.devices[0].uuid
    assert (pinned.refusal is None) == (pinned.granted_bytes == pinned.asked_bytes)
    assert pinned.register_granted_bytes == pinned.chunk_bytes or pinned.register_refusal is not None


def test_speeds_are_measured_and_in_order(facts: Facts) -> None:
    speed = facts.speed.value
    assert speed is not None
    print(speed)
    assert speed.h2d_pinned_bytes_per_s is not None, speed.unknown
    assert speed.device_copy_bytes_per_s is not None
    assert speed.device_copy_bytes_per_s > speed.h2d_pinned_bytes_per_s > 1e8
    assert speed.h2d_pageable_bytes_per_s.keys() == speed.ram_read_bytes_per_s.keys()
    assert speed.h2d_staged_bytes_per_s.keys() == speed.ram_read_bytes_per_s.keys()
    assert 1 in speed.h2d_pageable_bytes_per_s
    assert all(rate > 1e7 for rate in speed.h2d_staged_bytes_per_s.values())


def test_ballast_is_held_while_pinning(facts: Facts) -> None:
    loaded = gather(GatherOptions(groups=("host", "pinned"), ballast_bytes=512 * MIB)).pinned
    assert loaded.status is ProbeStatus.OK, loaded.error
    assert loaded.value is not None
    assert loaded.value.ballast_bytes == 512 * MIB
    assert loaded.value.ballast_resident_bytes is not None, loaded.value.unknown
    assert loaded.value.ballast_resident_bytes >= 512 * MIB  # all of it is in VRAM
    assert loaded.value.granted_bytes > 0


def test_ballast_beyond_the_card_is_refused_before_pinning(facts: Facts) -> None:
    huge = gather(GatherOptions(groups=("host", "pinned"), ballast_bytes=1 << 50)).pinned
    assert huge.status is ProbeStatus.FAILED
    assert huge.error is not None
    assert huge.error.call is not None
    assert "ballast" in huge.error.call


def test_hidden_devices_are_an_error_with_its_code_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    facts = gather(GatherOptions(groups=("host", "cuda", "pinned")))
    assert facts.cuda.status is ProbeStatus.FAILED
    assert facts.cuda.error is not None
    assert (facts.cuda.error.code, facts.cuda.error.name) == (100, "cudaErrorNoDevice")
    assert facts.cuda.value is not None
    assert facts.cuda.value.visible_devices == "-1"
    assert facts.cuda.value.libcuda_loaded is not None
    assert facts.pinned.status is ProbeStatus.SKIPPED


def test_facts_survive_a_file(facts: Facts, tmp_path: Path) -> None:
    write_facts(facts, tmp_path / "facts.json")
    assert read_facts(tmp_path / "facts.json") == facts
