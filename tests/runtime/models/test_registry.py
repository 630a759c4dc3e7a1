"""An architecture is there when all of it is: a file, answers, a plan, a way on a GPU, a row in README."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from strata.doctor.facts_io import read_facts
from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.runtime.cuda.support import why_not
from strata.runtime.models import ARCHITECTURES
from tests.resident import FLOAT, GOLDEN, QUANTISED

REPO = Path(__file__).parents[3]
README = (REPO / "README.md").read_text(encoding="utf-8").splitlines()
H200 = read_facts(REPO / "fixtures" / "machines" / "h200-measured.json")


def golden_of(architecture: str) -> list[str]:
    """Names of the golden models of an architecture that have answers."""
    found = []
    for path in sorted(GOLDEN.glob("*.gguf")):
        with open_gguf(path, header_only=True) as file:
            if file.metadata["general.architecture"] == architecture and path.with_suffix(".npz").exists():
                found.append(path.stem)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_has_a_file_of_its_own(architecture: str) -> None:
    model = ARCHITECTURES[architecture]
    module = importlib.import_module(f"strata.runtime.models.{architecture}")
    assert model.__module__ == module.__name__
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {f"strata.runtime.models.{other}" for other in ARCHITECTURES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_backends_are_held_against_its_golden_models(architecture: str) -> None:
    names = golden_of(architecture)
    assert set(names) & set(FLOAT)
    assert set(names) <= set(FLOAT + QUANTISED)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_can_be_planned_and_run(architecture: str, device: str) -> None:
    for name in golden_of(architecture):
        with open_gguf(GOLDEN / f"{name}.gguf") as file:
            facts = read_model_facts(file)
            plan = make_plan(H200, facts, PlanOptions(device=device, max_context=64))
            assert plan.feasible
            assert why_not(file, facts, "f16") is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_readme_lists_it(architecture: str) -> None:
    rows = [row for row in README if row.startswith(f"| `{architecture}`")]
    assert len(rows) == 1
    assert [cell.strip() for cell in rows[0].split("|")[2:-1]] == ["yes", "yes", "yes"]


def test_the_readme_lists_no_other() -> None:
    assert sum(row.endswith("| yes | yes | yes |") for row in README) == len(ARCHITECTURES)
