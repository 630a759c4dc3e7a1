"""Granite MoE: Llama's layout with constant factors, and in some models a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
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


class GraniteMoe(Decoder):
    """See the module's text."""

    rope_style: ClassVar[RopeStyle] = RopeStyle.NORM
    keys: ClassVar[frozenset[str]] = frozenset({"attention.scale", "embedding_scale", "logit_scale", "residual_scale"})
    unused: ClassVar[Mapping[str, tuple[object, ...]]] = {"rope.scaling.finetuned": (True,)}  # else there is no rope

    @classmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """See `Decoder.tensors`."""
        shapes = outer_shapes(facts)
        for layer in range(facts.layers):
            shapes |= attention_shapes(facts, layer) | routed_ffn_shapes(facts, layer)
            if facts.shared_width:
                shapes |= shared_ffn_shapes(facts, layer, gated=False)
        return shapes

    def layer(self, index: int, x: Array, position: Position) -> None:
        """See `Decoder.layer`."""
        self._attention(index, x, position)
        self._routed_ffn(index, x)
