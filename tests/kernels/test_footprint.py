"""The bytes that `strata.gguf.footprint` promises are the bytes that the numpy backend takes."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest

from strata.gguf import footprint
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from tests.resident import GOLDEN, allocate, load_golden

NAMES = ["qwen3moe", "llama", "qwen3moe-Q4_K", "olmoe", "granitemoe-shared", "qwen2moe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("chunk", [1, 256])
def test_a_call_allocates_no_more_than_the_temporaries(name: str, kv: str, chunk: int) -> None:
    model, experts, _ = load_golden(name, chunk=chunk, context=600, kv=kv, threads=2)
    facts = model.config.facts
    tokens = np.arange(chunk, dtype=np.int32) % facts.vocab
    logits = allocate(footprint.logits(facts))
    model.forward(tokens, 0)  # once without looking: imports and caches
    experts.asked.clear()
    experts.weights.clear()
    tracemalloc.start()
    model.logits(model.forward(tokens, 340)[-1:], logits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    allowed = footprint.temporaries_size(facts, chunk).bytes
    assert peak <= allowed - footprint.DEQUANTISE_TEMPORARY_BYTES  # the table is float32 here


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_sizes_are_those_of_the_arrays(name: str, kv: str) -> None:
    facts = read_model_facts(open_gguf(GOLDEN / f"{name}.gguf"))
    for spec in footprint.workspace(facts, 7, kv, 3):
        assert spec.nbytes == allocate(spec).nbytes
        assert spec.formula.endswith(f" x {allocate(spec).itemsize}")
    assert footprint.workspace_size(facts, 7, kv, 3).bytes == sum(
        s.nbytes for s in footprint.workspace(facts, 7, kv, 3)
    )
    cells = [spec for layer in footprint.kv_cache(facts, 50, kv) if layer for spec in layer]
    size = footprint.kv_cache_size(facts, 50, kv)
    assert size.bytes == sum(allocate(spec).nbytes for spec in cells)
    assert size.formula.startswith(f"50 tokens x {sum(facts.kv_heads)} KV heads")
    assert footprint.logits(facts, 3).nbytes == 3 * facts.vocab * 4


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_counted_as_float32(name: str) -> None:
    file = open_gguf(GOLDEN / f"{name}.gguf")
    facts = read_model_facts(file)
    outer = ("token_embd.weight", "output.weight")
    dense = sum(t.elements for n, t in file.tensors.items() if n not in outer and "_exps." not in n)
    assert footprint.dense_size(facts).bytes == 4 * dense
    assert footprint.head_size(facts).bytes == 4 * facts.embedding * facts.vocab
    expert = 3 * facts.embedding * facts.expert_width * 4
    assert footprint.expert_slot_size(facts).bytes == expert  # these widths are whole cache lines
    assert f"{footprint.head_size(facts).bytes // 4:,}" in footprint.head_size(facts).formula


def test_a_layer_without_attention_keeps_no_cells() -> None:
    facts = read_model_facts(open_gguf(GOLDEN / "llama.gguf"))
    hybrid = msgspec.structs.replace(facts, kv_heads=(0, 2))
    assert footprint.kv_cache(hybrid, 10, "f32")[0] is None
    assert 2 * footprint.kv_cache_size(hybrid, 10, "f32").bytes == footprint.kv_cache_size(facts, 10, "f32").bytes


def test_the_largest_parts_are_named() -> None:
    facts = read_model_facts(open_gguf(GOLDEN / "llama.gguf"))
    formula = footprint.workspace_size(facts, 512, "f32", 2).formula
    assert formula.startswith("512 tokens, 2 threads: ")
    assert "results" in formula
    assert "others" in formula
