"""The promise: a fresh process never holds more than its plan says, while loading, reading a prompt or decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import TinyModel

MODEL = TinyModel(
    layers=3,
    embedding=512,
    heads=8,
    kv_heads=4,
    head_size=64,
    vocab=4096,
    experts=20,
    top_k=4,
    width=512,
    expert_type="Q8_0",
    down_type="Q5_0",
    dense_type="Q8_0",
)
MIB = 1 << 20
CHILD = """
import json, sys, threading, time
from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from strata.runtime.process_memory import anonymous_bytes
from tests.runtime.plans import planned

file = open_gguf(sys.argv[1])
plan = planned(file, **json.loads(sys.argv[2]))
before = highest = anonymous_bytes()
done = threading.Event()

def watch():
    global highest
    while not done.wait(0.001):
        highest = max(highest, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
with Engine.load(file, plan) as engine:
    loaded = anonymous_bytes()
    engine.prefill([token % 4096 for token in range(plan.context - 8)])
    for token in range(8):
        engine.decode(token)
    report = engine.memory_report()
done.set()
watcher.join()
print(json.dumps({
    "planned": report.planned_bytes,
    "context": plan.line("context").bytes,
    "allocated": report.allocated_bytes,
    "loaded": loaded - before,
    "reported": report.peak_bytes - before,
    "whole": report.peak_bytes,
    "highest": highest - before,
    "after": anonymous_bytes() - before,
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="counts a process's own pages, which Linux tells")
@pytest.mark.parametrize(
    "options",
    [{"expert_cache": 6}, {"expert_cache": 60, "kv": "f16"}, {"expert_cache": 4, "ram_budget_bytes": 210 * MIB}],
    ids=["few slots", "all slots, f16", "experts in the file"],
)
def test_the_process_never_grows_beyond_its_plan(model: Path, options: dict[str, object]) -> None:
    command = [sys.executable, "-c", CHILD, str(model), json.dumps({"max_context": 300, **options})]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert figures["allocated"] <= figures["loaded"] <= figures["highest"]
    assert figures["whole"] <= figures["planned"]
    # What was there before loading (interpreter, libraries) is what the "context" line is for; the rest does without.
    assert figures["highest"] <= figures["planned"] - figures["context"]
    assert 0 <= figures["highest"] - figures["reported"] < 4 * MIB
    assert figures["after"] < 4 * MIB
