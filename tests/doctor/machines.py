"""The recorded machines of fixtures/: complete facts as reported, what each should be told, and its near misses."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from strata.doctor.checks.machine import Machine
from strata.doctor.checks.registry import run_checks
from strata.doctor.facts import Facts
from strata.doctor.findings import Finding, Status
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.gguf.model_facts import ModelFacts

FIXTURES = Path(__file__).parents[2] / "fixtures"
PROBLEMS = (Status.WARN, Status.FAIL, Status.CRASHED)


class NearMiss(msgspec.Struct, frozen=True):
    """One or two facts changed (a path in the document -> its new value), after which `check` must keep silent."""

    check: str
    why: str
    changes: dict[str, Any]


class Expected(msgspec.Struct, frozen=True):
    """What a machine should be told: `finds` are the problems, all of them; `passes` must be said to be fine."""

    report: str
    finds: list[str]
    near_misses: list[NearMiss] = []
    passes: list[str] = []
    options: dict[str, Any] = {}


@dataclass(frozen=True)
class Case:
    name: str
    expected: Expected
    document: dict[str, Any]  # a Facts document and, beside it, "model", "plan" and "options"

    def machine(self, changes: dict[str, Any] | None = None) -> Machine:
        document = copy.deepcopy(self.document)
        for path, value in (changes or {}).items():
            *parents, last = path.split(".")
            owner: Any = document
            for name in parents:
                owner = owner[int(name)] if isinstance(owner, list) else owner[name]
            owner[last] = value
        model, plan, options = (document.pop(name, None) for name in ("model", "plan", "options"))
        return Machine(
            msgspec.convert(document, Facts, str_keys=True),
            model and msgspec.convert(model, ModelFacts, str_keys=True),
            plan and msgspec.convert(plan, AllocationPlan, str_keys=True),
            msgspec.convert(options or {}, PlanOptions),
        )


@cache
def cases() -> dict[str, Case]:
    index = msgspec.json.decode((FIXTURES / "expected_findings.json").read_bytes(), type=dict[str, Expected])
    found = {}
    for name, expected in index.items():
        document = msgspec.json.decode((FIXTURES / "machines" / f"{name}.json").read_bytes())
        beside = FIXTURES / "plans" / f"{name}.json"
        more = msgspec.json.decode(beside.read_bytes()) if beside.is_file() else {}
        found[name] = Case(name, expected, document | more | {"options": expected.options})
    return found


def findings_of(machine: Machine) -> dict[str, Finding]:
    return {f.id: f for f in run_checks(machine)}
