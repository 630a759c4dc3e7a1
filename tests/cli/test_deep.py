"""`strata doctor MODEL --deep` as a person starts it, with real probe children on a simulated device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runner import MODEL, assert_clear, strata
from tests.doctor.probes.test_runner import waits_until_gone

ROOT = Path(__file__).parents[2]
FAKE_CUPY = """
import sys, time
from pathlib import Path
from tests.doctor.probes.fake_cupy import MIB, FakeRuntime, fake_cupy

class Runtime(FakeRuntime):
    def hostAlloc(self, size, flags):
        Path({marker!r}).write_text(str(__import__("os").getpid()))
        time.sleep({pause})
        return super().hostAlloc(size, flags)

sys.modules[__name__] = fake_cupy(Runtime(vram_bytes=2048 * MIB, pinned_bytes={pinned}))
"""
START = """
import msgspec
from strata.cli import doctor
from strata.cli.app import app
from strata.doctor.facts import CudaDevice, CudaFacts, Probe, ProbeStatus
from tests.doctor.machines_with_gpus import gpu_machine

def facts(model, options, recorded):
    machine = gpu_machine(name="Simulated", vram_total=2 << 30, vram_free=2000 << 20, ram=8 << 30, cuda=card)
    cuda = CudaFacts(devices=(card,), kernel_ok=True, cupy_packages={"cupy-cuda13x": "14.2.0"}, nvrtc_max_arch=120)
    return msgspec.structs.replace(machine, cuda=Probe(status=ProbeStatus.OK, value=cuda))

card = CudaDevice(ordinal=0, uuid="GPU-0", name="Simulated", vram_free_bytes=1900 << 20, context_bytes=100 << 20)
doctor.take_facts = facts
app()
"""


def start(tmp_path: Path, *arguments: str, pinned: int = 1 << 30, pause: float = 0) -> subprocess.Popen[str]:
    package = tmp_path / "site" / "cupy"
    package.mkdir(parents=True, exist_ok=True)
    marker = tmp_path / "child"
    (package / "__init__.py").write_text(FAKE_CUPY.format(marker=str(marker), pinned=pinned, pause=pause))
    path = os.pathsep.join([str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", START, "doctor", MODEL, "--deep", "--expert-cache", "4", *arguments],
        env={**os.environ, "PYTHONPATH": path, "STRATA_LOG_DIR": str(tmp_path / "logs"), "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_says_what_it_takes_then_shows_the_plan_on_what_was_granted(tmp_path: Path) -> None:
    process = start(tmp_path)
    answer, said = process.communicate(timeout=120)
    assert process.returncode == 0, answer + said
    assert "--deep takes up to" in said
    assert "of Simulated" in said
    assert "locked" in answer  # a line of the plan's table
    assert "granted when tried" not in said


def test_a_refusal_is_a_finding_and_the_plan_goes_round_it(tmp_path: Path) -> None:
    process = start(tmp_path, "--json", pinned=100_000)
    answer, said = process.communicate(timeout=120)
    assert process.returncode == 0, answer + said
    report = json.loads(answer)
    refusal = report["facts"]["pinned"]["value"]["refusal"]
    assert refusal["name"] == "cudaErrorMemoryAllocation"
    assert report["facts"]["pinned"]["value"]["ballast_bytes"] > 0
    assert "STR-PIN-LIMIT" in [f["id"] for f in report["findings"] if f["status"] == "warn"]
    assert sum(line["bytes"] for line in report["plan"]["reservations"] if line["tier"] == "pinned") <= 80_000


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_ends_it_and_nothing_stays_taken(tmp_path: Path) -> None:
    process = start(tmp_path, pause=60)
    marker = tmp_path / "child"
    deadline = time.monotonic() + 60
    while not (marker.is_file() and marker.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    answer, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert answer == ""
    assert waits_until_gone(int(marker.read_text()))  # the child that held the memory


def test_what_it_needs_is_said() -> None:
    assert_clear(strata("doctor", "--deep"), 2, "no model is given", "strata doctor MODEL --deep")
    assert_clear(strata("doctor", MODEL, "--deep", "--facts", "x.json"), 2, "a recorded machine cannot be tried")
    on_cpu = strata("doctor", MODEL, "--deep", "--device", "cpu")
    assert on_cpu.returncode == 0
    assert "--deep measured nothing: on the CPU nothing is page-locked" in on_cpu.stderr
