"""How many bytes a model needs on the numpy backend, as pure functions of its facts.

The planner charges these numbers and the runtime allocates by them, so the two cannot drift apart. Shapes use
the letters of `strata.kernels.ops`; C is the largest chunk of tokens in one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.gguf.model_facts import ModelFacts

QUERY_BLOCK = 16  # tokens that attention handles at a time
CELL_BLOCK = 512  # KV cells that attention handles at a time
TOKEN_BLOCK = 128  # tokens that one feed-forward product handles at a time
SLOT_ALIGNMENT = 64  # bytes: a cache line
DEQUANTISE_TEMPORARY_BYTES = 2 << 20  # most that `kernels.dequant.dequantise` allocates at once, for any type

ITEM_BYTES = {"f16": 2, "f32": 4, "i32": 4, "u8": 1, "u32": 4, "u64": 8}


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, and how they came about with the numbers put in."""

    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One array to allocate: `dtype` is a key of `ITEM_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "f32"

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def formula(self) -> str:
        """The product that gives `nbytes`."""
        return " x ".join(f"{number:,}" for number in (*self.shape, ITEM_BYTES[self.dtype]))


def workspace(model: ModelFacts, chunk: int, kv: str, threads: int) -> tuple[BufferSpec, ...]:
    """List the arrays that a call of up to `chunk` tokens works in, whatever the context.

    Parameters
    ----------
    model : ModelFacts
    chunk : int
        Tokens of the largest call, C.
    kv : str
        Type of the KV cache, "f16" or "f32"; f16 cells are widened block by block.
    threads : int
        Threads that compute; each has its own scratch.

    Returns
    -------
    tuple of BufferSpec
        Names starting with ``ops.`` are scratch of the operations, the others are the model's activations.
    """
    embedding, heads, groups = model.embedding, model.heads, max(model.kv_heads)
    key, value = model.key_length, model.value_length
    queries = min(QUERY_BLOCK, chunk) * heads
    tokens = min(TOKEN_BLOCK, chunk)
    buffers = [
        BufferSpec("x", (chunk, embedding)),
        BufferSpec("q", (chunk, heads * key)),
        BufferSpec("k", (chunk, groups * key)),
        BufferSpec("v", (chunk, groups * value)),
        BufferSpec("attended", (chunk, heads * value)),
        BufferSpec("ops.rows", (chunk, embedding)),
        BufferSpec("ops.rotated", (2, chunk * heads * key // 2)),
        BufferSpec("ops.angles", (chunk, key // 2 * 2)),
        BufferSpec("ops.queries", (threads, queries, key)),
        BufferSpec("ops.scores", (threads, queries, CELL_BLOCK)),
        BufferSpec("ops.attended", (threads, 2, queries, value)),
    ]
    if kv == "f16":
        buffers.append(BufferSpec("ops.cells", (threads, 2, CELL_BLOCK, groups * max(key, value))))
    if model.experts:
        rows = max(tokens, model.top_k)
        buffers += [
            BufferSpec("hidden", (chunk, embedding)),
            BufferSpec("ids", (chunk, model.top_k), "i32"),
            BufferSpec("weights", (chunk, model.top_k)),
            BufferSpec("results", (chunk, model.top_k, embedding)),
            BufferSpec("ops.router", (chunk, model.experts)),
            BufferSpec("ops.expert_rows", (threads, rows, embedding)),
            BufferSpec("ops.expert_gate_up", (threads, rows, 2 * model.expert_width)),
            BufferSpec("ops.expert_activation", (threads, rows, model.expert_width)),
        ]
    width = model.shared_width if model.experts else model.feed_forward
    if width:
        buffers += [BufferSpec("ops.gate_up", (2, tokens, width)), BufferSpec("ops.activation", (tokens, width))]
    return tuple(buffers)


def workspace_size(model: ModelFacts, chunk: int, kv: str, threads: int) -> Size:
    """Bytes of `workspace`, and the largest parts by name."""
    parts = {spec.name: spec.nbytes for spec in workspace(model, chunk, kv, threads)}
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    rest = sum(parts.values()) - sum(parts[name] for name in largest)
    terms = [f"{name.removeprefix('ops.')} {parts[name]:,}" for name in largest]
    return Size(sum(parts.values()), f"{chunk:,} tokens, {threads} threads: {' + '.join(terms)} + others {rest:,}")


def temporaries_size(model: ModelFacts, chunk: int) -> Size:
    """Bytes that NumPy allocates for itself while computing or loading; nobody hands them out, so nobody can hold them.

    In a chunk: the gathered embedding rows, and the sorted router with its merge buffer.
    """
    per_token = 4 * model.embedding + 16 * model.experts
    nbytes = chunk * per_token + (1 << 20) + DEQUANTISE_TEMPORARY_BYTES
    return Size(
        nbytes, f"{chunk:,} tokens x {per_token:,} + {1 << 20:,} + dequantisation {DEQUANTISE_TEMPORARY_BYTES:,}"
    )


def logits(model: ModelFacts, rows: int = 1) -> BufferSpec:
    """The array that takes the logits of `rows` tokens."""
    return BufferSpec("logits", (rows, model.vocab))


def kv_cache(model: ModelFacts, context: int, kv: str) -> tuple[tuple[BufferSpec, BufferSpec] | None, ...]:
    """Keys and values of each layer for `context` cells; None for a layer that keeps none."""
    return tuple(
        (
            BufferSpec(f"keys.{layer}", (context, groups, model.key_length), kv),
            BufferSpec(f"values.{layer}", (context, groups, model.value_length), kv),
        )
        if groups
        else None
        for layer, groups in enumerate(model.kv_heads)
    )


def kv_cache_size(model: ModelFacts, context: int, kv: str) -> Size:
    """Bytes of the KV cache of one sequence of `context` tokens."""
    groups, item = sum(model.kv_heads), ITEM_BYTES[kv]
    formula = (
        f"{context:,} tokens x {groups} KV heads of all layers x ({model.key_length} + {model.value_length}) x {item}"
    )
    return Size(context * groups * (model.key_length + model.value_length) * item, formula)


def dense_size(model: ModelFacts) -> Size:
    """Bytes of all dense weights but embedding and head, as float32."""
    return Size(4 * model.dense.elements, f"{model.dense.elements:,} weights x 4")


def head_size(model: ModelFacts) -> Size:
    """Bytes of the head as float32; a tied head is a float32 copy of the embedding."""
    return Size(4 * model.head.elements, f"{model.head.elements:,} weights x 4")


def expert_slot_size(model: ModelFacts) -> Size:
    """Bytes of a slot that holds one ready float32 expert: gate and up, then down, each on a cache line."""
    matrix = model.embedding * model.expert_width
    gate_up, down = (-(-4 * count // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for count in (2 * matrix, matrix))
    return Size(gate_up + down, f"3 x {model.embedding:,} x {model.expert_width:,} x 4, to {SLOT_ALIGNMENT}")
