"""Every kind of start-up failure that is publicly reported has a machine, whose verdict names that failure."""

from __future__ import annotations

import pytest

from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.diagnose import diagnose
from tests.doctor.machines import cases

KINDS = {  # what is reported -> the machine that shows it, and the check that must give the report's first line
    "WSL pinned budget": ("seed-000-budget-exhausted", "STR-WSL-PIN"),
    "misattributed start-up failure": ("seed-000-broken-context", "STR-CTX-BROKEN"),
    "misattributed start-up failure, in a container": ("wsl2-5080-docker-context", "STR-CTX-BROKEN"),
    "latched error": ("latched-error", "STR-PIN-LATCHED"),
    "WDDM coupling": ("seed-002-no-desktop", "STR-PIN-COUPLED"),
    "WDDM half of RAM": ("win11-32gib-half", "STR-PIN-HALF"),
    "whole range refused": ("win10-arena-slices", "STR-PIN-CALL"),
    "zero bytes": ("zero-byte-range", "STR-PIN-ZERO"),
    "power-of-two pool": ("power-of-two-pool", "STR-PIN-POOL"),
    "VirtualLock": ("virtuallock-87", "STR-PIN-LOCK"),
    "mlock": ("mlock-limit", "STR-PIN-LOCK"),
    "Linux 6.11": ("linux-611", "STR-KERNEL-PIN"),
    "container": ("docker-16-of-128", "STR-RAM-CGROUP"),
    "display GPU": ("desktop-on-3090", "STR-VRAM-DISPLAY"),
    "free, two truths": ("win-two-truths", "STR-VRAM-TRUTHS"),
    "someone else's VRAM": ("a6000-someone-else", "STR-VRAM-OTHERS"),
    "context and modules": ("large-context", "STR-VRAM-CONTEXT"),
    "silent spill": ("win-silent-spill", "STR-VRAM-SPILL"),
    "fragment of a plan": ("prompt-buffers-unplanned", "STR-VRAM-UNPLANNED"),
    "small card": ("8gb-card-no-room", "STR-PLAN-FIT"),
    "page file": ("win-small-page-file", "STR-WIN-COMMIT"),
    "VRAM larger than RAM in WSL": ("wsl2-96gb-card", "STR-WSL-VRAM"),
    "driver too old": ("driver-535-cuda13", "STR-DRV-OLD"),
    "no libcuda at all": ("container-without-libcuda", "STR-DRV-LIBCUDA"),
    "no device: CUDA_VISIBLE_DEVICES": ("visible-devices-wrong", "STR-CUDA-HIDDEN"),
    "no device: a wrong libcuda first": ("wsl2-shadowed-libcuda", "STR-WSL-LIBCUDA"),
    "busy": ("cluster-exclusive-busy", "STR-CUDA-BUSY"),
    "no kernel image": ("blackwell-nvrtc-124", "STR-CUDA-ARCH"),
    "PTX newer than driver": ("ptx-newer-than-driver", "STR-CUDA-PTX"),
    "unknown error after suspend": ("laptop-after-suspend", "STR-DRV-UVM"),
    "no /dev/nvidia-uvm": ("lxc-no-uvm", "STR-DRV-UVM"),
    "forked after init": ("forked-after-init", "STR-CUDA-FORK"),
    "library and kernel module differ": ("library-kernel-mismatch", "STR-DRV-MISMATCH"),
    "forward-compat package on a GeForce": ("compat-on-geforce", "STR-CUDA-COMPAT"),
    "Fabric Manager not running": ("fabric-manager-off", "STR-CUDA-FABRIC"),
    "an error that cannot be cleared": ("illegal-access", "STR-CUDA-STICKY"),
    "two CuPy packages": ("two-cupys", "STR-CUPY-TWO"),
    "order": ("gpu-order", "STR-GPU-ORDER"),
    "probe hangs": ("nvidia-smi-hangs", "STR-DRV-LOST"),
    "probe crashes": ("cuinit-segfaults", "STR-PROBE-CRASH"),
    "the real line among the noise": ("wsl2-make-resident", "STR-WSL-RESIDENT"),
    "link width": ("x1-riser", "STR-PCIE-WIDTH"),
    "iGPU copy": ("gb10-integrated", "STR-GPU-INTEGRATED"),
    "NUMA": ("dual-epyc-numa", "STR-CPU-NUMA"),
    "hybrid CPU": ("hybrid-14900k", "STR-CPU-HYBRID"),
    "load 24 times slower: priority": ("win-scheduled-task", "STR-CPU-PRIORITY"),
    "load slower: rotational disk": ("spinning-disk", "STR-DISK-SLOW"),
    "RAM short": ("32gib-for-80gib-model", "STR-RAM-SHORT"),
    "refused although it was planned": ("game-took-vram", "STR-RUN-REFUSED"),
}
NO_FAILURE = {  # what looks like one and is none
    "noise": "wsl2-noise",
    "nvidia-smi differs from the driver in WSL": "wsl2-noise",
    "a large page-locked budget in WSL": "wsl2-192gib-large-budget",
    "VRAM that the driver itself uses": "h200-measured",
    "a Linux desktop on its integrated GPU": "desktop-4070tis",
    "no GPU at all": "cpu-only-container",
}


@pytest.mark.parametrize(("machine", "check"), KINDS.values(), ids=list(KINDS))
def test_the_first_line_names_the_failure(machine: str, check: str) -> None:
    m = cases()[machine].machine()
    report = diagnose(m.facts, model=m.model, plan=m.plan, options=m.options)
    finding = next(f for f in report.findings if f.id == check)
    assert finding.what in report.verdict.sentence
    assert CATALOGUE[check].explanation


@pytest.mark.parametrize("machine", NO_FAILURE.values(), ids=list(NO_FAILURE))
def test_what_looks_like_a_failure_and_is_none_is_ready_without_a_but(machine: str) -> None:
    m = cases()[machine].machine()
    sentence = diagnose(m.facts, model=m.model, plan=m.plan, options=m.options).verdict.sentence
    assert sentence.startswith("Ready")
    assert "but" not in sentence


@pytest.mark.parametrize("name", [name for name, case in cases().items() if not case.expected.finds])
def test_a_machine_without_problems_has_none_in_its_first_line(name: str) -> None:
    m = cases()[name].machine()
    assert "but" not in diagnose(m.facts, model=m.model, plan=m.plan, options=m.options).verdict.sentence
