"""Small models on simulated machines: recorded facts with a model, planned for and started as `run --simulate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from strata.cli.preflight import OpenModel
from strata.cli.simulated_run import load_simulated
from strata.cli.simulation import Simulated, simulate
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.planner import make_plan
from strata.errors import AllocationFailed
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.engine import Engine
from strata.runtime.simulated import HOST_MALLOC
from tests.runtime.counted import CountedBlock
from tests.runtime.plans import planned
from tests.tiny_model import TinyModel

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = FIXTURES / "golden"
SEEDS = (
    "seed-000-broken-context",
    "seed-000-budget-exhausted",
    "seed-002-no-desktop",
    "seed-002-desktop-on-card",
    "seed-002-kv-window",
)
MIB = 1 << 20
PROMPT = [3, 14, 15]
CHUNK = 8
OPTIONS = PlanOptions(prefill=CHUNK)  # at the context that the machine's size goes by, few experts have a slot
NO_DEVICE = {"code": 100, "name": "cudaErrorNoDevice", "string": "no CUDA-capable device is detected"}
ILLEGAL = {"code": 700, "name": "cudaErrorIllegalAddress", "string": "an illegal memory access was encountered"}
FULL = {"code": 2, "name": "cudaErrorMemoryAllocation", "string": "out of memory"}
NO_RAM = {"call": HOST_MALLOC, "code": 12, "name": "ENOMEM", "string": "Cannot allocate memory"}
# Mostly experts, as the reports' model; large enough for a step of 1 MiB to be a small one.
MOSTLY_EXPERTS = TinyModel(
    layers=4, embedding=256, heads=4, kv_heads=2, head_size=64, vocab=256, experts=16, width=256, expert_type="Q8_0"
)


def machine_file(name: str) -> Path:
    """The facts of a recorded machine."""
    return FIXTURES / "machines" / f"{name}.json"


def written(name: str, folder: Path, **simulation: Any) -> Path:
    """The same facts, their section "simulation" changed."""
    document = msgspec.json.decode(machine_file(name).read_bytes())
    document["simulation"] = document.get("simulation", {}) | simulation
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(document))
    return path


def opened(path: Path) -> OpenModel:
    """A model as `strata run` opens it."""
    file = open_gguf(path)
    return OpenModel(file, read_model_facts(file))


def simulated_plan(
    model: OpenModel, facts: Path, options: PlanOptions | None = None, **changes: Any
) -> tuple[Simulated, AllocationPlan]:
    """A simulated machine and the plan for it; `changes` are of the small machine."""
    it = simulate(facts, model.facts, options or PlanOptions())
    it = Simulated(it.facts, msgspec.structs.replace(it.machine, **changes), it.options, it.notes, it.may_use_cpu)
    return it, make_plan(it.facts, model.facts, it.options)


class Events:
    """Takes the place of a run's log."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.fields: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.kinds.append(kind)
        self.fields.append(fields)


def loaded(model: OpenModel, plan: AllocationPlan, it: Simulated, log: Events | None = None) -> Engine:
    """The engine that `strata run` would get."""
    return load_simulated(model, plan, it, log or Events())  # type: ignore[arg-type]


def generated(engine: Engine, prompt: list[int], steps: int = 1) -> list[bytes]:
    """Greedy decoding: the logits, bit for bit, after the prompt and after each step."""
    logits = engine.prefill(prompt)
    seen = [logits.tobytes()]
    for _ in range(steps):
        logits = engine.decode(int(np.argmax(logits)))
        seen.append(logits.tobytes())
    assert np.isfinite(logits).all()
    return seen


def reference(file: GGUFFile, prompt: list[int], *, chunk: int) -> list[bytes]:
    """The same on the plain numpy backend."""
    with Engine.load(file, planned(file, prefill=chunk)) as engine:
        return generated(engine, prompt)


def outcome(model: OpenModel, it: Simulated, answer: list[bytes], capsys: pytest.CaptureFixture[str]) -> str:
    """Load, and see that it ends as it must; return "runs", "re-planned", "on the CPU" or "refused"."""
    plan, log = make_plan(it.facts, model.facts, it.options), Events()
    assert plan.feasible
    capsys.readouterr()
    try:
        engine = loaded(model, plan, it, log)
    except AllocationFailed as error:
        return is_clear(error, log)
    with engine:
        assert CountedBlock.alive > 0
        assert generated(engine, PROMPT) == answer
        on_cpu = engine.plan.device.backend == "numpy"
        assert on_cpu or engine.memory_report().difference_bytes >= 0
    said = " ".join(capsys.readouterr().err.split())
    replans = log.kinds.count("replan")
    assert replans == said.count("Planning once more: ") + said.count("trying once more") <= 1
    return "on the CPU" if on_cpu else "re-planned" if replans else "runs"


def is_clear(error: AllocationFailed, log: Events) -> str:
    """See that a refusal names the line and what was refused, leaves nothing, and came after one re-plan at most."""
    assert CountedBlock.alive == 0
    assert log.kinds.count("replan") <= 1
    for words in ("refused", f'"{error.line}"', "nothing stays allocated"):
        assert words in error.found
    assert error.remedy
    return "refused"
