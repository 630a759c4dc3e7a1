"""Puts a whole model into memory for tests: every expert in a slot of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from strata.gguf import footprint
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.kernels.dequant import dequantise
from strata.kernels.numpy_ops import NumpyOps
from strata.kernels.numpy_weights import NumpySlots, QuantRows
from strata.kernels.ops import ExpertWave, KvLayer
from strata.runtime.models import Decoder, build_model, load_config

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
# The golden models: both backends are held against every one.
FLOAT = ["qwen3moe", "llama", "olmoe", "granitemoe", "granitemoe-shared", "qwen2moe"]
QUANTISED = [f"qwen3moe-{kind}" for kind in ("Q4_K", "Q6_K", "IQ3_S", "IQ4_XS", "Q8_0", "MXFP4")]
DTYPES: dict[str, DTypeLike] = {"f16": np.float16, "f32": np.float32, "i32": np.int32}


def allocate(spec: footprint.BufferSpec) -> np.ndarray:
    """An array full of junk, so that reading what was never written shows."""
    return np.full(spec.shape, 77, DTYPES[spec.dtype])


def make_workspace(facts: ModelFacts, chunk: int, kv: str = "f32", threads: int = 1) -> dict[str, np.ndarray]:
    return {spec.name: allocate(spec) for spec in footprint.workspace(facts, chunk, kv, threads)}


class ResidentExperts:
    """Every expert of every layer in a slot; `place` maps (layer, expert) to it."""

    def __init__(
        self,
        ops: NumpyOps,
        slots: NumpySlots | None,
        place: Callable[[int, int], int],
        buffers: Mapping[str, np.ndarray],
        waves: int = 1,
    ) -> None:
        self.ops, self.slots, self.place, self.waves = ops, slots, place, waves
        self.buffers = buffers
        self.asked: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []

    def add(self, layer: int, hidden: Any, ids: Any, weights: Any, residual: Any) -> None:
        self.asked.append(ids.copy())
        self.weights.append(weights.copy())
        results = self.buffers["results"][: len(ids)]
        experts = np.unique(ids)
        for part in np.array_split(experts, min(self.waves, len(experts))):
            where = [np.nonzero(ids == expert) for expert in part]
            wave = ExpertWave(
                [self.place(layer, int(expert)) for expert in part],
                [tokens for tokens, _ in where],
                [ranks for _, ranks in where],
            )
            self.ops.expert_ffn(hidden, self.slots, wave, results)
        self.ops.combine(results, weights, residual)


def read_tensor(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    out = np.empty(tensor.shape[::-1], np.float32)
    dequantise(file.raw(name), tensor.type.name, out)
    return out


def fill_slots(file: GGUFFile, facts: ModelFacts, place: Callable[[int, int], int], count: int) -> NumpySlots:
    pool = np.full((count, footprint.expert_slot_size(facts).bytes // 4), 77, np.float32)
    slots = NumpySlots.over(pool, facts.embedding, facts.expert_width)
    for layer in range(facts.layers):
        gate, up, down = (read_tensor(file, f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        for expert in range(facts.experts):
            slot = place(layer, expert)
            slots.gate_up[slot] = np.concatenate([gate[expert], up[expert]])
            slots.down[slot] = down[expert]
    return slots


def make_resident(
    file: GGUFFile,
    *,
    chunk: int = 128,
    context: int = 128,
    kv: str = "f32",
    threads: int = 1,
    place: Callable[[int, int], int] | None = None,
    slots: int | None = None,
    waves: int = 1,
) -> tuple[Decoder, ResidentExperts]:
    """Load everything that `file` holds."""
    config = load_config(file)
    facts = config.facts
    place = place or (lambda layer, expert: layer * facts.experts + expert)
    buffers = make_workspace(facts, chunk, kv, threads)
    ops = NumpyOps(buffers)
    weights: dict[str, Any] = {name: read_tensor(file, name) for name in file.tensors if "_exps." not in name}
    table = file.tensors["token_embd.weight"]
    weights.setdefault("output.weight", weights["token_embd.weight"])
    weights["token_embd.weight"] = QuantRows(file.raw("token_embd.weight").reshape(table.shape[1], -1), table.type.name)
    cells = [KvLayer(*map(allocate, specs)) for specs in footprint.kv_cache(facts, context, kv) if specs]
    pool = fill_slots(file, facts, place, slots or facts.layers * facts.experts) if facts.experts else None
    experts = ResidentExperts(ops, pool, place, buffers, waves)
    return build_model(config, weights, ops, buffers, cells, experts), experts


def load_golden(name: str, **options: Any) -> tuple[Decoder, ResidentExperts, Mapping[str, np.ndarray]]:
    """A golden model, its experts and its answers."""
    model, experts = make_resident(open_gguf(GOLDEN / f"{name}.gguf"), **options)
    return model, experts, np.load(GOLDEN / f"{name}.npz")


def all_logits(model: Decoder, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
    """Logits after every token, fed in chunks of the given lengths."""
    assert sum(chunks) == len(tokens)
    parts, position = [], 0
    for length in chunks:
        x = model.forward(tokens[position : position + length], position)
        out = np.empty((length, model.config.facts.vocab), np.float32)
        model.logits(x, out)
        parts.append(out)
        position += length
    return np.concatenate(parts)


def relative_error(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Norm of the difference over norm of the answer, along the last axis."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    return difference / np.linalg.norm(expected.astype(np.float64), axis=-1)
