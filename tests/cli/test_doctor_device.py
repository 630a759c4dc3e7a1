"""`strata doctor` about the device that was asked for: a GPU that is not there, and a CPU that needs none."""

import json

import pytest

from tests.cli.runner import MODEL, assert_clear, strata
from tests.doctor.machines import FIXTURES


def on(machine: str, *arguments: str):
    return strata("doctor", "--facts", str(FIXTURES / "machines" / f"{machine}.json"), *arguments)


@pytest.mark.parametrize("model", [(), (MODEL,)], ids=["machine", "model"])
@pytest.mark.parametrize("asked", [("--device", "cuda"), ("--gpu", "7")], ids=["cuda", "gpu"])
def test_a_gpu_asked_for_where_there_is_none_is_never_ready(asked: tuple[str, ...], model: tuple[str, ...]) -> None:
    result = on("cpu-only-container", *model, *asked, "--json")
    report = json.loads(result.stdout)
    verdict = report["verdict"]
    assert (result.returncode, verdict["exit_code"]) == (3, 3)
    assert "plan for an NVIDIA GPU" in verdict["sentence"]
    said = " ".join(finding["what"] for finding in report["findings"])
    assert ("no model was given" in said) is not bool(model)


def test_a_gpu_number_that_no_gpu_has_is_wrong_use_with_a_model_or_without() -> None:
    assert_clear(on("desktop-4070tis", "--gpu", "7"), 2, "this machine has 0 (")
    assert_clear(on("desktop-4070tis", MODEL, "--gpu", "7"), 2, "this machine has 0 (")


@pytest.mark.parametrize("machine", ["no-cupy", "driver-535-cuda13", "nvidia-smi-hangs", "two-cupys"])
def test_what_concerns_the_gpu_alone_does_not_decide_about_the_cpu(machine: str) -> None:
    on_cpu = on(machine, MODEL, "--device", "cpu")
    assert on_cpu.returncode == 0, on_cpu.stdout
    assert on_cpu.stdout.splitlines()[0].split(maxsplit=1)[1].startswith("Ready on the CPU, as asked: ")
    assert "FAIL" in on_cpu.stdout  # it is told all the same
    assert on(machine).returncode == 1


def test_what_concerns_ram_decides_about_the_cpu_too() -> None:
    assert on("docker-16-of-128", "--device", "cpu", "--strict").returncode == 1
    assert on("docker-16-of-128", "--device", "cpu").returncode == 0
