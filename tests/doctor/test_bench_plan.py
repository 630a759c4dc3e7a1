"""How long a plan takes: released models and recorded headers on every card of the table and every recorded machine."""

import statistics
import time
from itertools import product
from pathlib import Path

import pytest

from strata.doctor.cards import CARDS
from strata.doctor.facts import Facts
from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.doctor.what_if import what_if_facts
from strata.errors import StrataError
from strata.gguf.model_facts import ModelFacts, read_model_facts
from strata.gguf.reader import open_gguf
from tests.doctor.golden_plans import MODELS
from tests.doctor.machines import cases
from tests.doctor.machines_with_gpus import PINNED_45_GIB, rtx_5060_ti_on_windows
from tests.doctor.shapes import DENSE, GIB, SMALL_MOE

pytestmark = pytest.mark.bench
OPTIONS = [
    PlanOptions(device=device, max_context=context, **budget)
    for device, context, budget in product(
        ("cuda", "cpu"), (None, 16_384, 131_072), ({}, {"ram_budget_bytes": 16 * GIB}, {"vram_budget_bytes": 4 * GIB})
    )
]


def imagined() -> dict[str, Facts]:
    return {
        f"{card.name}, {ram} GiB, {system}": what_if_facts(card, ram * GIB, system=system)[0]
        for card, ram, system in product(CARDS, (32, 64), ("linux", "wsl2", "windows"))
    }


def recorded() -> dict[str, Facts]:
    coupled = rtx_5060_ti_on_windows(monitor_on_card=False, pinned=PINNED_45_GIB)
    return {"Windows, all couplings": coupled} | {name: case.machine().facts for name, case in cases().items()}


def headers() -> list[ModelFacts]:
    found = []
    for path in sorted(Path(__file__).parents[2].glob("fixtures/headers/*.gguf")):
        with open_gguf(path, header_only=True) as file:
            found.append(read_model_facts(file))
    return found


@pytest.mark.parametrize("machines", [imagined, recorded])
def test_the_time_of_a_plan(machines) -> None:
    taken = []
    for name, facts in machines().items():
        for model, options in product((*MODELS, DENSE, SMALL_MOE, *headers()), OPTIONS):
            start = time.process_time()
            try:
                plan = make_plan(facts, model, options)
            except StrataError:
                continue
            taken.append((1e3 * (time.process_time() - start), f"{model.name} on {name}", plan.feasible))
    for feasible in (True, False):
        times = sorted((ms, what) for ms, what, fits in taken if fits == feasible)
        median, (worst, what) = statistics.median(ms for ms, _ in times), times[-1]
        kind = "fit" if feasible else "do not fit, their changes found"
        print(f"\n{len(times):,} plans that {kind}: median {median:.1f} ms, longest {worst:.1f} ms ({what})")
