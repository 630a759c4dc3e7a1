"""How many bytes a model needs on the CUDA backend, as pure functions of its facts.

Weights keep their stored form on the device, block for block, so their sizes are the file's. Letters as in
`footprint`; W is the summed output width of one layer's dense projections.
"""

from __future__ import annotations

from strata.gguf.footprint import Size
from strata.gguf.model_facts import ModelFacts

ARRAY_ALIGNMENT = 256  # bytes: what the allocator and the widest copies want
KV_GROUP = 64  # values of an int8 KV cache that share one f16 scale


def dense_size(model: ModelFacts) -> Size:
    """Bytes of all dense weights but embedding and head, as stored, each tensor aligned."""
    d = model.dense
    return Size(
        d.bytes + d.tensors * ARRAY_ALIGNMENT,
        f"{d.bytes:,} bytes as stored + {d.tensors} tensors x {ARRAY_ALIGNMENT}",
    )


def kv_cache_size(model: ModelFacts, context: int, kv: str) -> Size:
    """Bytes of keys, values and index keys of `context` tokens; `kv` is "f16" or "int8"."""
    groups = sum(model.kv_heads)
    values = groups * (model.key_length + model.value_length) + model.index_values
    nbytes = 2 * values if kv == "f16" else values + 2 * -(-values // KV_GROUP)
    each = "2" if kv == "f16" else f"(1 + 2 / {KV_GROUP})"
    return Size(context * nbytes, f"{context:,} tokens x {values:,} values x {each}")


def workspace_size(model: ModelFacts, chunk: int) -> Size:
    """Bytes of what a call of up to `chunk` tokens works in.

    For each token: seven arrays of the hidden size in float32 (the residual, its norm, temporaries and up to four
    residual streams), every dense projection of a layer in float32 with its f16 operand, the K expert results, what
    the K experts compute in between, and the router's logits, order and weights. For Qwen3.8-Flash-Next this comes to
    427 KB, beside about 430 KB reported for another engine.
    """
    width = -(-model.dense.elements // (model.layers * model.embedding))
    top_k = model.top_k
    terms = {
        "hidden": 28 * model.embedding,
        "dense": 6 * width + 4 * model.feed_forward,
        "experts": top_k * (4 * model.embedding + 10 * model.expert_width),
        "router": 4 * model.experts + 24 * top_k,
    }
    fixed = 16 << 20  # partial results of attention and of split products
    formula = " + ".join(f"{name} {nbytes:,}" for name, nbytes in terms.items() if nbytes)
    return Size(fixed + chunk * sum(terms.values()), f"{chunk:,} tokens x ({formula}) + {fixed:,}")


def expert_slot_bytes(stored: int) -> int:
    """Bytes of a slot for experts of `stored` bytes."""
    return -(-stored // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
