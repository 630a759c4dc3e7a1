"""How many bytes a model needs on the CUDA backend, as pure functions of its facts.

Weights keep their stored form on the device, block for block, so their sizes are the file's.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.gguf import footprint
from strata.gguf.cuda_prompt_footprint import prompt_counts, prompt_inputs, prompt_workspace, reads_prompts
from strata.gguf.footprint import ITEM_BYTES, BufferSpec, Size
from strata.gguf.model_facts import ModelFacts

ARRAY_ALIGNMENT = 256  # bytes: what the allocator and the widest copies want
CALL_TOKENS = 8  # that one call of the decode kernels takes
ATTENTION_SPLITS = 32  # as in `strata.kernels.cuda_layout`
INPUT_SAMPLING = 64  # where the options of sampling start in "inputs", bytes
INPUT_ROWS = 128  # where the rows do
CHOSEN = 4  # tokens that are chosen on the device before the host looks at the first
COUNTS = 4  # as in `strata.kernels.residency`
SAMPLE_STRETCH = 64  # as in `strata.kernels.cuda_layout`
LOAD_PIECE = 4 << 20  # bytes of the file that are brought to the device at once
LOAD_PIECES = 8  # on their way at the same time


def dense_size(model: ModelFacts) -> Size:
    """Bytes of all dense weights but embedding and head, as stored, each tensor aligned."""
    d = model.dense
    return Size(
        d.bytes + d.tensors * ARRAY_ALIGNMENT,
        f"{d.bytes:,} bytes as stored + {d.tensors} tensors x {ARRAY_ALIGNMENT}",
    )


def kv_cache_size(model: ModelFacts, context: int, kv: str) -> Size:
    """Bytes of keys, values and index keys of `context` tokens; `kv` is "f16", "f32" or "int8"."""
    kept = footprint.kv_cache_size(model, context, kv)
    if not model.index_values:
        return kept
    scales = footprint.kv_scales(model.index_values) if kv == "int8" else 0
    index = model.index_values * ITEM_BYTES[kv] + scales * ITEM_BYTES["f16"]
    return Size(kept.bytes + context * index, f"{kept.formula} + {context:,} x {index:,} of index keys")


def workspace(model: ModelFacts, chunk: int) -> tuple[BufferSpec, ...]:
    """List the device's arrays that a call works in, whatever the context.

    Parameters
    ----------
    model : ModelFacts
    chunk : int
        Tokens of the largest prompt chunk; a call of the decode kernels takes `CALL_TOKENS` of them at most.

    Returns
    -------
    tuple of BufferSpec
        Names starting with ``ops.`` are scratch of the operations, with ``prompt.`` what chunks of more than
        `CALL_TOKENS` work in; "inputs" has what changes from call to call, "piece" a piece of the file on its way to
        its place.
    """
    tokens, heads, groups = min(chunk, CALL_TOKENS), model.heads, max(model.kv_heads)
    key, value = model.key_length, model.value_length
    buffers = [
        BufferSpec("x", (tokens, model.embedding)),
        BufferSpec("q", (tokens, heads * key)),
        BufferSpec("k", (tokens, groups * key)),
        BufferSpec("v", (tokens, groups * value)),
        BufferSpec("attended", (tokens, heads * value)),
        BufferSpec("rope", (key // 2,)),
        _inputs(model, tokens),
        BufferSpec("piece", (LOAD_PIECE,), "u8"),
        BufferSpec("ops.partial", (tokens * heads * ATTENTION_SPLITS * (value + 2),)),
        BufferSpec("ops.counters", (tokens * heads,), "u32"),
        BufferSpec("ops.maxima", (-(-model.vocab // SAMPLE_STRETCH),), "u32"),
        BufferSpec("chosen", (1,), "i32"),
    ]
    if model.experts:
        buffers += [
            BufferSpec("hidden", (tokens, model.embedding)),
            BufferSpec("ids", (model.layers, tokens, model.top_k), "i32"),
            BufferSpec("slots", (tokens, model.top_k), "i32"),
            BufferSpec("weights", (tokens, model.top_k)),
            BufferSpec("ops.logits", (tokens, model.experts)),
            BufferSpec("ops.activation", (tokens * model.top_k, model.expert_width)),
            *_tables(model, tokens),
        ]
    width = model.shared_width if model.experts else model.feed_forward
    if width:
        buffers += [BufferSpec(f"ops.{name}", (tokens, width)) for name in ("gate", "up")]
        buffers.append(BufferSpec("ops.share", (tokens,)))
    if takes_prompts(model, chunk):
        buffers += prompt_workspace(model, chunk)
    return tuple(buffers)


def takes_prompts(model: ModelFacts, chunk: int) -> bool:
    """Return whether chunks of so many tokens go through the kernels for prompts, given that all experts have slots."""
    return chunk > CALL_TOKENS and reads_prompts(model)


def workspace_size(model: ModelFacts, chunk: int) -> Size:
    """Bytes of `workspace`, and the largest parts by name."""
    return _sum(workspace(model, chunk), f"{_tokens(model, chunk)} tokens")


def host_io(model: ModelFacts, chunk: int) -> tuple[BufferSpec, ...]:
    """List the host's arrays that copies to and from the device go through."""
    tokens = min(chunk, CALL_TOKENS)
    buffers = [
        _inputs(model, tokens),
        BufferSpec("logits", (1, model.vocab)),
        BufferSpec("pieces", (LOAD_PIECES, LOAD_PIECE), "u8"),
        BufferSpec("chosen", (CHOSEN,), "i32"),
    ]
    if model.experts:
        buffers += [
            BufferSpec("ids", (model.layers, tokens, model.top_k), "i32"),
            BufferSpec("counts", (CHOSEN, COUNTS), "u64"),
            BufferSpec("wanted", (1 + 2 * tokens * model.top_k,), "i32"),
        ]
    if takes_prompts(model, chunk):
        buffers.append(prompt_inputs(model, chunk))
        if model.experts:
            buffers.append(prompt_counts(model))
    return tuple(buffers)


def host_io_size(model: ModelFacts, chunk: int) -> Size:
    """Bytes of `host_io`, and the largest parts by name."""
    return _sum(host_io(model, chunk), f"{_tokens(model, chunk)} tokens")


def _tokens(model: ModelFacts, chunk: int) -> int:
    return chunk if takes_prompts(model, chunk) else min(chunk, CALL_TOKENS)


def _inputs(model: ModelFacts, tokens: int) -> BufferSpec:
    """Position and tokens, how to sample, then the tokens' rows of the embedding, as stored."""
    row = model.embedding_table.bytes // max(model.vocab, 1)
    return BufferSpec("inputs", (INPUT_ROWS + tokens * row,), "u8")


def _tables(model: ModelFacts, tokens: int) -> tuple[BufferSpec, ...]:
    """The tables of `strata.kernels.residency`, by their names there; there are never more slots than experts."""
    keys = model.layers * model.experts
    return (
        BufferSpec("tables.slot_of", (keys,), "i32"),
        BufferSpec("tables.owner", (keys,), "i32"),
        BufferSpec("tables.use", (keys, 2), "u32"),
        BufferSpec("tables.calls", (model.layers,), "u32"),
        BufferSpec("tables.source", (keys,), "u64"),
        BufferSpec("tables.counts", (COUNTS,), "u64"),
        BufferSpec("tables.wanted", (1 + 2 * tokens * model.top_k,), "i32"),
    )


def _sum(specs: Sequence[BufferSpec], what: str) -> Size:
    parts = {spec.name: spec.nbytes for spec in specs}
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    rest = sum(parts.values()) - sum(parts[name] for name in largest)
    terms = [f"{name.removeprefix('ops.')} {parts[name]:,}" for name in largest]
    return Size(sum(parts.values()), f"{what}: {' + '.join(terms)} + others {rest:,}")


def expert_slot_bytes(stored: int) -> int:
    """Bytes of a slot for experts of `stored` bytes."""
    return -(-stored // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
