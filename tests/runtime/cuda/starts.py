"""Does a plan that passes start? Fresh processes under random limits, on a card that is really filled.

    python -m tests.runtime.cuda.starts MODEL.gguf [MODEL.gguf ...] --count 200 --seed 1 --seconds 500

Each start draws a model, a context, a KV type and budgets; half of them find the card filled by this process but for a
few GiB, the others get a --vram-budget. The facts are taken once, and what is free is asked of the driver before each
start. A plan that is refused for a full card is loaded all the same, to see whether it would have started with its
reserve left; the first change that it names is applied, and must start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from strata.doctor.facts import Facts
from strata.doctor.facts_io import read_facts, write_facts
from strata.doctor.gather import gather
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.errors import StrataError, UsageError
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.engine import Engine

MIB, GIB = 1 << 20, 1 << 30
_SIZES = {"GiB": GIB, "MiB": MIB}
_BUDGETS = {"--vram-budget": "vram_budget_bytes", "--ram-budget": "ram_budget_bytes"}
_NUMBERS = {"--max-context": "max_context", "--prefill": "prefill", "--expert-cache": "expert_cache"}


def changed(options: PlanOptions, change: str) -> PlanOptions:
    """Apply a change as it is typed."""
    words = change.split()
    for name, value in zip(words[::2], words[1::2], strict=True):
        fields: dict[str, Any]
        if name in _BUDGETS:
            fields = {_BUDGETS[name]: int(value[:-3]) * _SIZES[value[-3:]]}
        elif name == "--vram-reserve-mib":
            fields = {"vram_reserve_bytes": int(value) * MIB}
        else:
            fields = {"kv": value} if name == "--kv" else {_NUMBERS[name]: int(value)}
        options = msgspec.structs.replace(options, **fields)
    return options


def started(file: GGUFFile, plan: AllocationPlan) -> dict[str, Any]:
    """Load by a plan and run a few tokens; say what was taken, or what went wrong."""
    try:
        with Engine.load(file, plan) as engine:
            logits = engine.prefill(list(range(1, min(10, plan.context + 1))))
            report = engine.memory_report()
            return {
                "ok": bool(np.isfinite(logits).all()),
                "taken": report.vram_taken_bytes,
                "free": report.vram_free_bytes,
                "ram_over": -report.difference_bytes,
                "notes": engine.notes,
            }
    except StrataError as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def one(task: dict[str, Any]) -> dict[str, Any]:
    """One start, in this process."""
    facts, options = read_facts(Path(task["facts"])), msgspec.convert(task["options"], PlanOptions)
    with open_gguf(Path(task["model"])) as file:
        model = read_model_facts(file)
        try:
            plan = make_plan(facts, model, options)
        except UsageError as error:
            return {"usage": str(error)}
        reserve = next(b.reserve_bytes for b in plan.budgets if b.tier is Tier.VRAM)
        found: dict[str, Any] = {"feasible": plan.feasible, "reserve": reserve}
        found |= {"planned": plan.planned_bytes(Tier.VRAM), "slots": plan.experts.slots, "total": plan.experts.total}
        found |= {"pinned": plan.experts.pinned, "pageable": plan.experts.pageable, "in_file": plan.experts.file}
        if plan.feasible:
            return found | {"start": started(file, plan)}
        found["why"] = plan.shortfall.sentence if plan.shortfall else ""
        found["line"] = plan.shortfall.line if plan.shortfall else ""
        if options.vram_budget_bytes is None and options.ram_budget_bytes is None:
            found["anyway"] = started(file, msgspec.structs.replace(plan, feasible=True))
        if plan.changes and plan.changes[0].option:
            found["change"] = plan.changes[0].option
            second = make_plan(facts, model, changed(options, plan.changes[0].option))
            found["changed"] = started(file, second) if second.feasible else {"ok": False, "error": "refused again"}
        return found


@dataclass
class Card:
    """The card, filled by this process but for what a start is to find free."""

    uuid: str
    pointer: int = 0
    free: int = field(default=0)

    def leave(self, nbytes: int | None) -> None:
        """Leave so much free, by the driver's count; None empties the card."""
        import cupy

        runtime = cupy.cuda.runtime
        if self.pointer:
            runtime.free(self.pointer)
            self.pointer = 0
        if nbytes is not None:
            self.pointer = runtime.malloc(self._free() - nbytes)
        self.free = self._free()

    def _free(self) -> int:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(self.uuid)).free)


def seen(facts: Facts, free: int) -> Facts:
    """The facts as they are with so much free."""
    replace = msgspec.structs.replace
    assert facts.nvml.value is not None
    assert facts.cuda.value is not None
    gpus = tuple(replace(gpu, vram_free_bytes=free) for gpu in facts.nvml.value.gpus)
    devices = tuple(replace(d, vram_free_bytes=free - (d.context_bytes or 0)) for d in facts.cuda.value.devices)
    nvml = replace(facts.nvml, value=replace(facts.nvml.value, gpus=gpus))
    return replace(facts, nvml=nvml, cuda=replace(facts.cuda, value=replace(facts.cuda.value, devices=devices)))


def drawn(rng: np.random.Generator, models: list[Path]) -> tuple[Path, dict[str, Any], int | None]:
    """Draw a model, options, and what the card is to have free (None: a budget instead)."""
    model = models[int(rng.integers(len(models)))]
    large = model.stat().st_size > GIB
    vram = int(np.exp(rng.uniform(np.log(0.6), np.log(5.0 if large else 2.5))) * GIB) // MIB * MIB

    def maybe(odds: float, value: Any) -> Any:
        return value if rng.random() < odds else None

    with open_gguf(model) as file:
        longest = min(read_model_facts(file).context_length, 40960)
    options = {
        "device": "cuda",
        "max_context": int(np.exp(rng.uniform(np.log(64), np.log(longest)))),
        "kv": maybe(0.5, str(rng.choice(["f16", "f32"]))),
        "pinned_budget_bytes": maybe(0.6, int(rng.choice([0, 64, 256, 1024, 4096])) * MIB),
        "ram_budget_bytes": maybe(0.3, int(rng.integers(900, 5000)) * MIB),
        "vram_reserve_bytes": maybe(0.3, int(rng.integers(128, 600)) * MIB),
        "prefill": maybe(0.2, int(rng.integers(1, 9))),
    }
    if rng.random() < 0.5:
        return model, options | {"vram_budget_bytes": vram}, None
    return model, options, vram


def main(arguments: list[str]) -> int:
    """Run the starts and print what came of them; 1 when a promise was broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--one", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no start after that")
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(one(json.loads(given.one.read_text()))))
        return 0
    facts = gather()
    assert facts.nvml.value is not None
    card, rng = Card(str(facts.nvml.value.gpus[0].uuid)), np.random.default_rng(given.seed)
    begun, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        facts_file, task_file = Path(folder, "facts.json"), Path(folder, "task.json")
        for number in range(given.count):
            if time.monotonic() - begun > given.seconds:
                break
            model, options, free = drawn(rng, given.models)
            card.leave(free)
            write_facts(seen(facts, card.free), facts_file)
            task_file.write_text(json.dumps({"model": str(model), "options": options, "facts": str(facts_file)}))
            command = [sys.executable, "-m", "tests.runtime.cuda.starts", "--one", str(task_file)]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            result = json.loads(process.stdout) if process.returncode == 0 else {"crash": process.stderr[-2000:]}
            results.append(result | {"number": number, "model": model.name, "options": options, "left": free})
            for broken in judged(results[-1]):
                print(f"{number}: {broken}: {json.dumps(results[-1])}", flush=True)
    card.leave(None)
    tally(results, time.monotonic() - begun)
    return int(any(judged(result) for result in results))


def judged(result: dict[str, Any]) -> list[str]:
    """Name the promises that a start broke."""
    broken = []
    if "crash" in result:
        broken.append("crashed")
    if result.get("feasible"):
        start = result["start"]
        if not start["ok"]:
            return ["accepted, but did not start"]
        if start["taken"] is not None and start["taken"] > result["planned"]:
            broken.append("took more VRAM than planned")
        if start["ram_over"] > 0:
            broken.append("took more RAM than planned")
    anyway = result.get("anyway")
    if anyway and anyway["ok"] and anyway["free"] >= result["reserve"]:
        broken.append("refused, but would have started")
    if result.get("changed") and not result["changed"]["ok"]:
        broken.append("the change that was named did not help")
    return broken


def tally(results: list[dict[str, Any]], seconds: float) -> None:
    """Print the figures."""
    broken = Counter(name for result in results for name in judged(result))
    accepted = [r for r in results if r.get("feasible")]
    refused = [r for r in results if r.get("feasible") is False]
    good = [r for r in accepted if r["start"]["ok"]]
    print(f"{len(results)} starts in {seconds:.0f} s: {len(accepted)} accepted, {len(refused)} refused,", end=" ")
    print(f"{sum('usage' in r for r in results)} options refused as such; broken: {dict(broken) or 'nothing'}")
    print(
        f"refusals by line: {dict(Counter(r['line'] for r in refused))}; changes applied: {_count(refused, 'changed')},"
    )
    print(f"loaded all the same: {_count(refused, 'anyway')}; notes: {sum(bool(r['start']['notes']) for r in good)}")
    partly = [r for r in good if r["slots"] < r["total"]]
    print(
        f"of those started, {len(partly)} with fewer slots than experts: {sum(r['pageable'] > 0 for r in partly)} with"
    )
    print(f"pageable experts, {sum(r['in_file'] > 0 for r in partly)} with some in the file")
    slack = [r["planned"] - r["start"]["taken"] for r in good if r["start"]["taken"] is not None]
    if slack:
        print(f"planned - taken, MiB: least {min(slack) / MIB:.0f}, median {np.median(slack) / MIB:.0f}, most", end=" ")
        print(f"{max(slack) / MIB:.0f}")
    over = [r["start"]["free"] - r["reserve"] for r in partly if r["left"] is not None]
    if over:
        share = [100 * o / r["left"] for o, r in zip(over, (r for r in partly if r["left"] is not None), strict=True)]
        print(
            f"free after loading beyond the reserve, of {len(over)} full cards: median {np.median(over) / MIB:.0f} MiB",
            end="",
        )
        print(f" ({np.median(share):.1f} % of what was free), most {max(over) / MIB:.0f} MiB ({max(share):.1f} %)")


def _count(results: list[dict[str, Any]], name: str) -> int:
    return sum(name in r for r in results)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
