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
