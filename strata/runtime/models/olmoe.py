"""OLMoE: q and k normed over all heads together, every feed-forward routed, with weights as the softmax has them."""

from __future__ import annotations

from typing import ClassVar

from strata.gguf.model_facts import ModelFacts
from strata.kernels.ops import Array, Position, RopeStyle
from strata.runtime.models.common import Decoder, Shapes, attention_shapes, outer_shapes, routed_ffn_shapes


class Olmoe(Decoder):
    """See the module's text."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NEOX
    normalise: ClassVar[bool] = False

    @classmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """See `Decoder.tensors`."""
        shapes = outer_shapes(facts)
        for layer in range(facts.layers):
            shapes |= attention_shapes(facts, layer)
            shapes[f"blk.{layer}.attn_q_norm.weight"] = (facts.heads * facts.key_length,)
            shapes[f"blk.{layer}.attn_k_norm.weight"] = (facts.kv_heads[layer] * facts.key_length,)
            shapes |= routed_ffn_shapes(facts, layer)
        return shapes

    def layer(self, index: int, x: Array, position: Position) -> None:
        """See `Decoder.layer`."""
        weights = self._layers[index]
        self._attention(index, x, position, row_norms=(weights["attn_q_norm"], weights["attn_k_norm"]))
        self._routed_ffn(index, x)
