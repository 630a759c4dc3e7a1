"""Qwen3 MoE: grouped-query attention with normed heads, every feed-forward routed."""

from __future__ import annotations

from typing import ClassVar

from strata.gguf.model_facts import ModelFacts
from strata.kernels.ops import Array, Position, RopeStyle
from strata.runtime.models.common import Decoder, Shapes, attention_shapes, outer_shapes, routed_ffn_shapes


class Qwen3Moe(Decoder):
    """See the module's text."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NEOX

    @classmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """See `Decoder.tensors`."""
        shapes = outer_shapes(facts)
        for layer in range(facts.layers):
            shapes |= attention_shapes(facts, layer)
            shapes[f"blk.{layer}.attn_q_norm.weight"] = (facts.key_length,)
            shapes[f"blk.{layer}.attn_k_norm.weight"] = (facts.key_length,)
            shapes |= routed_ffn_shapes(facts, layer)
        return shapes

    def layer(self, index: int, x: Array, position: Position) -> None:
        """See `Decoder.layer`."""
        weights = self._layers[index]
        self._attention(index, x, position, head_norms=(weights["attn_q_norm"], weights["attn_k_norm"]))
        self._routed_ffn(index, x)
