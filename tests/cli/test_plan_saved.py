"""What is said of a plan that was saved: by what it runs, and when nothing runs by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import MODEL, strata


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--device", "cpu"), 0, "The plan is saved: strata run "),
        (("--device", "cpu", "--ram-budget", "1MiB"), 1, "The plan is saved: it does not fit, so nothing runs by it."),
        (("--gpu", "RTX 4090", "--ram", "64GiB"), 0, "The plan is saved: it is for that machine, and strata run "),
    ],
    ids=["here", "does not fit", "of a machine that is not here"],
)
def test_only_what_runs_here_is_recommended(options: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    result = strata("plan", MODEL, *options, "-o", str(tmp_path / "plan.json"))
    assert (result.returncode, (tmp_path / "plan.json").exists()) == (code, True)
    assert said in " ".join(result.stderr.split())


def test_options_that_the_plan_has_anyway_may_stand_beside_it(tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    assert strata("plan", MODEL, "--device", "cpu", "-o", saved).returncode == 0
    run = ("run", MODEL, "--plan", saved, "--no-chat", "-p", "a", "--max-tokens", "1")
    assert strata(*run, "--device", "cpu", "--kv", "f32").returncode == 0
    other = strata(*run, "--kv", "f16")
    assert (other.returncode, "with another --kv" in other.stderr) == (2, True)
