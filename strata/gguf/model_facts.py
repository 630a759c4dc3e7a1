"""What a GGUF header says of a model, as frozen data: all that a planner needs, for any architecture.

Sizes come from the tensor index alone, so a header without its weights is enough.
"""

from __future__ import annotations

import msgspec


class TensorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A category of tensors: how many, how many weights, and their bytes as stored."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class ExpertClass(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of one size (layers quantised alike); one slot can hold any expert of its class."""

    layers: tuple[int, ...]
    experts_per_layer: int
    elements: int  # weights of one expert: gate + up + down
    bytes: int  # of one expert as stored
    types: tuple[str, str, str]  # quant types of gate, up, down


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One model by its numbers.

    Names follow the GGUF keys: `embedding` is hidden size E, `heads` H, `kv_heads` KV per layer (0 where a
    layer keeps no KV cache), `key_length` and `value_length` per head, `experts` N, `top_k` K,
    `expert_width` F, `feed_forward` the dense width.
    """

    name: str
    architecture: str
    path: str
    file_bytes: int  # all shards
    header_bytes: int
    header_sha256: str
    layers: int
    embedding: int
    heads: int
    kv_heads: tuple[int, ...]  # one per layer
    key_length: int
    value_length: int
    vocab: int
    context_length: int
    feed_forward: int
    experts: int
    top_k: int
    expert_width: int
    tied_head: bool  # no output.weight: the embedding is the head too
    embedding_table: TensorGroup
    head: TensorGroup  # output.weight; the embedding's numbers again when tied
    dense: TensorGroup  # everything else that is not a routed expert: attention, norms, routers, shared experts
    expert_classes: tuple[ExpertClass, ...]
    quant_types: tuple[str, ...]  # every type that occurs
