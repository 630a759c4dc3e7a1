"""Every recorded machine has a sound plan on the CPU and on its GPU, or a clear reason why there is none."""

from pathlib import Path

import pytest

from strata.doctor.facts_io import read_facts
from strata.doctor.invariants import broken
from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.errors import Undetermined
from tests.doctor.shapes import Q3_30B

MACHINES = sorted((Path(__file__).parents[2] / "fixtures" / "machines").glob("*.json"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_a_machine_has_a_sound_plan_or_a_reason(file, device):
    facts = read_facts(file)
    gpus = len(facts.nvml.value.gpus if facts.nvml.value else ()) + len(
        facts.cuda.value.devices if facts.cuda.value else ()
    )
    if device == "cuda" and not gpus:
        with pytest.raises(Undetermined):
            make_plan(facts, Q3_30B, PlanOptions(device=device))
        return
    plan = make_plan(facts, Q3_30B, PlanOptions(device=device))
    if plan.feasible:
        assert not broken(plan)
    else:
        assert plan.changes
