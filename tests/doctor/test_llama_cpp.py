"""A plan said in llama.cpp's flags: the buffers it really logged, the bytes that its flags place, and the words."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from strata.doctor.llama_cpp import buffers, llama_cpp
from strata.doctor.plan import PlanOptions
from strata.doctor.planner import make_plan
from strata.gguf.model_facts import ModelFacts, read_model_facts
from strata.gguf.reader import open_gguf
from tests.doctor.golden_plans import CARDS, MODELS, plan
from tests.doctor.machines_with_gpus import rtx_4090_on_wsl2
from tests.doctor.shapes import DENSE, GIB, MIB, MIXTRAL, Q3_30B, Q3_235B, SMALL_MOE, machine

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Logged by llama.cpp as built in xllamacpp 2026.10.11549, on a CPU; see `record_llama_cpp`.
LOG = (FIXTURES / "plans" / "llama_cpp.log").read_text().strip().split("\n\n")
KIND = {"load_tensors": "model", "llama_kv_cache": "KV", "llama_memory_recurrent": "RS"}


def logged(lines: list[str]) -> dict[str, float]:
    """MiB by kind of buffer, as logged."""
    found = [re.fullmatch(r"(\w+): \S+ .*buffer size = (\S+) MiB", line) for line in lines]
    pairs = sorted((KIND[m[1]], float(m[2])) for m in found if m and m[1] in KIND)
    return {kind: sum(mib for _, mib in group) for kind, group in groupby(pairs, key=lambda pair: pair[0])}


def facts_of(name: str) -> ModelFacts:
    whole, header = FIXTURES / "golden" / f"{name}.gguf", FIXTURES / "headers" / f"{name}.gguf"
    with open_gguf(whole) if whole.exists() else open_gguf(header, header_only=True) as file:
        return read_model_facts(file)


@pytest.mark.parametrize("case", LOG, ids=lambda case: case.splitlines()[0])
def test_the_buffers_are_those_that_a_real_llama_cpp_logged(case: str) -> None:
    command, *lines = case.splitlines()
    name, _, context, _, kv, *_ = command.split()
    ours, theirs = buffers(facts_of(name), int(context), kv, None), logged(lines)
    assert f"{ours.host_model / MIB:.2f}" == f"{theirs['model']:.2f}"
    assert ours.device_model == 0
    if name == "qwen4exp":  # index keys and n-gram states take more there, see docs/plan.md
        assert ours.kv / MIB < theirs["KV"] <= 1.25 * ours.kv / MIB
        assert ours.state / MIB < theirs["RS"] <= ours.state / MIB + 0.02
    else:
        assert f"{ours.kv / MIB:.2f}" == f"{theirs['KV']:.2f}"
        assert f"{ours.state / MIB:.2f}" == f"{theirs.get('RS', 0):.2f}"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_flags_place_no_more_in_vram_than_the_plan(model: ModelFacts, card: str) -> None:
    p = plan(model, card)
    if not p.feasible:
        return
    said = llama_cpp(p, model, "m.gguf")
    pool = sum(line.bytes for line in p.reservations if line.id.startswith("expert_slots"))
    weights = p.line("dense").bytes + p.line("head").bytes
    assert said.buffers.device_model <= weights + pool
    assert said.buffers.kv <= p.line("kv_cache").bytes
    rest = model.dense.bytes + model.head.bytes + model.embedding_table.bytes + model.row_tables.bytes
    experts = sum(len(c.layers) * c.experts_per_layer * c.bytes for c in model.expert_classes)
    assert said.buffers.device_model + said.buffers.host_model == rest + experts
    if "-ncmoe" in said.arguments:  # and one more layer of experts would not have fitted
        first = int(said.arguments[said.arguments.index("-ncmoe") + 1])
        more = buffers(model, p.context, "f16", first - 1).device_model
        assert more - model.dense.bytes - model.head.bytes > pool
    else:
        assert "-cmoe" in said.arguments or p.experts.slots == p.experts.total


def flags(arguments: tuple[str, ...]) -> str:
    return " ".join(arguments)


def test_a_model_that_fits_goes_to_vram_whole() -> None:
    said = llama_cpp(plan(Q3_30B, "RTX 4090"), Q3_30B, "a model.gguf")
    assert said.arguments[:2] == ("-m", "a model.gguf")
    assert flags(said.arguments[2:]) == (
        "-sm none -ngl 999 -c 16384 -np 1 -b 2048 -ub 2048 -fa on -ctk f16 -ctv f16 --load-mode none"
    )
    assert not any("xperts" in sentence for sentence in said.differences)


def test_what_it_cannot_say_is_said() -> None:
    said = llama_cpp(plan(MIXTRAL, "RTX 4090"), MIXTRAL, "m.gguf")
    words = " ".join(said.differences)
    assert "-ncmoe 10" in flags(said.arguments)
    for phrase in ("181 slots", "whole layers", "--moe-cache-mib", "Staging ring: none", "256 MiB free"):
        assert phrase in words
    said = llama_cpp(plan(Q3_235B, "RTX 3060"), Q3_235B, "m.gguf")  # 58 slots hold no layer; some experts page-locked
    assert "-cmoe" in said.arguments
    assert flags(said.arguments).endswith("--load-mode mmap")
    assert any("5,138 in page-locked RAM, 6,894 in the model file" in sentence for sentence in said.differences)


def test_int8_is_q8_0_and_without_page_locking_none_is_asked_for() -> None:
    options = PlanOptions(device="cuda", kv="int8", max_context=1000, vram_budget_bytes=8 * GIB)
    p = make_plan(rtx_4090_on_wsl2(pinned=None), Q3_30B, options)
    assert p.experts.pageable == p.experts.total
    said = llama_cpp(p, Q3_30B, "m.gguf")
    assert "-ctk q8_0 -ctv q8_0" in flags(said.arguments)
    assert "--no-host --no-repack" in flags(said.arguments)
    words = " ".join(said.differences)
    assert "34 bytes for 32 values" in words
    assert "up to 1,024 tokens" in words


@pytest.mark.parametrize("model", [DENSE, SMALL_MOE], ids=lambda model: model.name)
def test_a_plan_for_the_cpu_uses_no_gpu(model: ModelFacts) -> None:
    said = llama_cpp(make_plan(machine(8 * GIB), model, PlanOptions()), model, "m.gguf")
    assert "--device none -ngl 0 --no-repack" in flags(said.arguments)
    assert "-cmoe" not in said.arguments
    assert said.buffers.device_model == 0
    assert "float32" in said.differences[0]


def test_a_tied_head_is_in_vram_beside_the_embedding() -> None:
    tied = msgspec.structs.replace(SMALL_MOE, tied_head=True, head=SMALL_MOE.embedding_table)
    on_cpu, on_gpu = buffers(tied, 4096, "f16", None), buffers(tied, 4096, "f16", 0)
    assert on_gpu.host_model == tied.embedding_table.bytes
    assert on_gpu.device_model + on_gpu.host_model == on_cpu.host_model + tied.head.bytes
