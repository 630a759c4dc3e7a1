"""Qwen1.5 and Qwen2 MoE: biased q, k and v, routed weights as the softmax has them, and a shared expert with a gate."""

from __future__ import annotations

from typing import ClassVar

from strata.gguf.model_facts import ModelFacts
from strata.kernels.ops import Array, Position, RopeStyle
from strata.runtime.models.common import (
    Decoder,
    Shapes,
    attention_shapes,
    outer_shapes,
    routed_ffn_shapes,
    shared_ffn_shapes,
)


class Qwen2Moe(Decoder):
    """See the module's text."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NEOX
    normalise: ClassVar[bool] = False

    @classmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """See `Decoder.tensors`."""
        shapes = outer_shapes(facts)
        for layer in range(facts.layers):
            attention = attention_shapes(facts, layer)
            shapes |= attention | routed_ffn_shapes(facts, layer) | shared_ffn_shapes(facts, layer, gated=True)
            for part in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{layer}.{part}.bias"] = (attention[f"blk.{layer}.{part}.weight"][1],)
        return shapes

    def layer(self, index: int, x: Array, position: Position) -> None:
        """See `Decoder.layer`."""
        weights = self._layers[index]
        biases = (weights["attn_q.bias"], weights["attn_k.bias"], weights["attn_v.bias"])
        self._attention(index, x, position, biases=biases)
        self._routed_ffn(index, x)
