"""Llama and what shares its layout: dense (Llama, SmolLM, Mistral) or with routed experts (Mixtral)."""

from __future__ import annotations

from typing import ClassVar

from strata.gguf.model_facts import ModelFacts
from strata.kernels.ops import Array, Position, RopeStyle
from strata.runtime.models.common import (
    ROPE_FACTORS,
    Decoder,
    ModelConfig,
    Shapes,
    attention_shapes,
    dense_ffn_shapes,
    outer_shapes,
    routed_ffn_shapes,
)


class Llama(Decoder):
    """See the module's text."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NORM

    @classmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """See `Decoder.tensors`."""
        shapes = outer_shapes(facts)
        for layer in range(facts.layers):
            shapes |= attention_shapes(facts, layer)
            shapes |= routed_ffn_shapes(facts, layer) if facts.experts else dense_ffn_shapes(facts, layer)
        return shapes

    @classmethod
    def optional_tensors(cls, config: ModelConfig) -> Shapes:
        """Llama 3.1 and later scale their rotary frequencies one by one."""
        return {ROPE_FACTORS: (config.rope.dims // 2,)}

    def layer(self, index: int, x: Array, position: Position) -> None:
        """See `Decoder.layer`."""
        self._attention(index, x, position)
        if self._facts.experts:
            self._routed_ffn(index, x)
        else:
            self._dense_ffn(index, x)
