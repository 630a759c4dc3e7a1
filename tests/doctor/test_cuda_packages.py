import shlex
import tomllib
from pathlib import Path

import pytest

from strata.doctor.cuda_packages import PACKAGES, pip_install
from tests.doctor.machines import cases, findings_of

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_packages_are_those_of_the_extra(extra: str) -> None:
    assert list(PACKAGES[extra]) == PROJECT["project"]["optional-dependencies"][extra]
    assert shlex.split(pip_install(extra, "-U")) == ["pip", "install", "-U", *PACKAGES[extra]]


def test_no_remedy_sends_pip_to_a_project_that_only_has_the_name() -> None:
    for case in cases().values():
        for finding in findings_of(case.machine()).values():
            assert "strata[" not in (finding.remedy or ""), finding.id
