"""What the architectures share: their numbers, their blocks, and what they need of the runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias

from strata.gguf.model_facts import ModelFacts
from strata.kernels.ops import Array, KvLayer, Ops, Position, Rope, RopeStyle, Weight

Shapes: TypeAlias = dict[str, tuple[int, ...]]  # tensor name -> shape in ggml order

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors of an architecture.

    Attributes
    ----------
    attention : float
        Of the scores, ``1 / sqrt(head size)`` in most.
    embedding, residual, logits : float
        Of the embedding, of what each block adds to the residual stream, and of the logits.
    """

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that the arithmetic of a model needs.

    Attributes
    ----------
    facts : ModelFacts
    eps : float
        Of every RMS norm.
    rope : Rope
        With any scaling by a key, not by a tensor, already applied.
    normalise : bool
        Whether the weights of the chosen experts are made to sum to 1.
    scales : Scales
    """

    facts: ModelFacts
    eps: float
    rope: Rope
    normalise: bool
    scales: Scales


class Experts(Protocol):
    """Runs routed experts, wherever they lie: the runtime's expert cache, or experts that all have a slot."""

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """``residual[t] += sum over ranks, in rank order, of weights[t, r] * expert ids[t, r] of hidden[t]``.

        Parameters
        ----------
        layer : int
        hidden : Array, float32 [T, E]
        ids : Array, int32 [T, K]
        weights : Array, float32 [T, K]
        residual : Array, float32 [T, E]
        """


class Decoder(ABC):
    """A decoder-only transformer, ready to run. Each architecture is a subclass in a file of its own.

    Parameters
    ----------
    config : ModelConfig
    weights : mapping of str to Weight
        Every tensor that is not a routed expert, by its name in the file. ``output.weight`` is there for a tied
        head too.
    ops : Ops
    buffers : mapping of str to Array
        The arrays of the backend's workspace; a call uses as many rows as it has tokens. ``ids`` has three dimensions,
        the layer first, where the backend reads them all after a call.
    kv : sequence of KvLayer
        One per layer.
    experts : Experts or None
        None for a dense model.
    """

    rope_style: ClassVar[RopeStyle]
    normalise: ClassVar[bool] = True  # `ModelConfig.normalise` of files that do not say
    keys: ClassVar[frozenset[str]] = frozenset()  # metadata keys that most architectures have no use for
    unused: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # keys that only this one refuses, but for these values

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        ops: Ops,
        buffers: Mapping[str, Array],
        kv: Sequence[KvLayer],
        experts: Experts | None,
    ) -> None:
        self.config = config
        self.ops = ops
        self._facts = config.facts
        self._buffers = buffers
        self._kv = kv
        self._experts = experts
        self._embedding = weights[EMBEDDING]
        self._output_norm = weights["output_norm.weight"]
        self._head = weights[HEAD]
        self._rope = config.rope
        if ROPE_FACTORS in weights:
            self._rope = replace(
                config.rope, inverse_frequencies=config.rope.inverse_frequencies / weights[ROPE_FACTORS]
            )
        # Names are looked up once: "attn_q" for "blk.0.attn_q.weight".
        self._layers: list[dict[str, Weight]] = [{} for _ in range(self._facts.layers)]
        for name, weight in weights.items():
            if name.startswith("blk."):
                _, layer, part = name.removesuffix(".weight").split(".", 2)
                self._layers[int(layer)][part] = weight

    @classmethod
    @abstractmethod
    def tensors(cls, facts: ModelFacts) -> Shapes:
        """Return the shape of every tensor that a model of this architecture must have."""

    @classmethod
    def optional_tensors(cls, config: ModelConfig) -> Shapes:
        """Return the shape of every tensor that it may have besides."""
        return {}

    @abstractmethod
    def layer(self, index: int, x: Array, position: Position) -> None:
        """Run one layer in place on the residual stream of the tokens from `position` on, `x` float32 [T, E]."""

    def forward(self, tokens: Array, position: Position) -> Array:
        """Run all layers on a chunk of tokens.

        Parameters
        ----------
        tokens : Array, int32 [T]
            At most as many as the workspace was made for.
        position : Position
            Of the first token; the KV cache holds all before it.

        Returns
        -------
        Array, float32 [T, E]
            The residual stream before the final norm: a view of a buffer that the next call overwrites.
        """
        x = self._buffers["x"][: len(tokens)]
        self.ops.embed(self._embedding, tokens, x, scale=self.config.scales.embedding)
        for index in range(self._facts.layers):
            self.layer(index, x, position)
        return x

    def logits(self, x: Array, out: Array) -> None:
        """Write the logits [T, V] of rows that `forward` gave."""
        self.ops.head(x, self._output_norm, self.config.eps, self._head, out, scale=self.config.scales.logits)

    def _attention(
        self,
        index: int,
        x: Array,
        position: Position,
        *,
        head_norms: tuple[Weight, Weight] | None = None,
        row_norms: tuple[Weight, Weight] | None = None,
        biases: tuple[Weight, Weight, Weight] | None = None,
    ) -> None:
        """Add causal grouped-query attention.

        Parameters
        ----------
        head_norms, row_norms : (Weight, Weight), optional
            Of q and k: of each head [D], or of all heads together [H x D] and [G x D].
        biases : (Weight, Weight, Weight), optional
            Of q, k and v.
        """
        facts, weights, kv, tokens = self._facts, self._layers[index], self._kv[index], len(x)
        eps, scales = self.config.eps, self.config.scales
        q, k, v, attended = (self._buffers[name][:tokens] for name in ("q", "k", "v", "attended"))
        projections = (weights["attn_q"], weights["attn_k"], weights["attn_v"])
        self.ops.norm_project(x, weights["attn_norm"], eps, projections, (q, k, v), biases)
        if row_norms is not None:
            self.ops.norm_rows((q, k), row_norms, eps)
        groups = facts.kv_heads[index]
        q = q.reshape(tokens, facts.heads, facts.key_length)
        k = k.reshape(tokens, groups, facts.key_length)
        v = v.reshape(tokens, groups, facts.value_length)
        out = attended.reshape(tokens, facts.heads, facts.value_length)
        self.ops.attention(q, k, v, head_norms, eps, self._rope, position, kv, scales.attention, out)
        self.ops.project_add(attended, weights["attn_output"], x, scale=scales.residual)

    def _routed_ffn(self, index: int, x: Array) -> None:
        """Add the weighted outputs of the experts that the router chooses, and of the shared one where there is one."""
        weights, tokens = self._layers[index], len(x)
        ids = self._buffers["ids"]
        ids = (ids if ids.ndim == 2 else ids[index])[:tokens]
        hidden, factors = (self._buffers[name][:tokens] for name in ("hidden", "weights"))
        config = self.config
        norm, router, scale = weights["ffn_norm"], weights["ffn_gate_inp"], config.scales.residual
        self.ops.route(x, norm, config.eps, router, config.normalise, hidden, ids, factors, scale=scale)
        assert self._experts is not None, "a model with routed experts needs a cache of them"
        self._experts.add(index, hidden, ids, factors, x)
        if self._facts.shared_width:
            gate, up, down = (weights[f"ffn_{part}_shexp"] for part in ("gate", "up", "down"))
            self.ops.shared_ffn(hidden, weights.get("ffn_gate_inp_shexp"), gate, up, down, x, scale=scale)

    def _dense_ffn(self, index: int, x: Array) -> None:
        """Add a gated feed-forward of all tokens."""
        weights = self._layers[index]
        gate, up, down = weights["ffn_gate"], weights["ffn_up"], weights["ffn_down"]
        self.ops.dense_ffn(x, weights["ffn_norm"], self.config.eps, gate, up, down)


def outer_shapes(facts: ModelFacts) -> Shapes:
    """Return the tensors around the layers."""
    table = (facts.embedding, facts.vocab)
    shapes: Shapes = {EMBEDDING: table, "output_norm.weight": (facts.embedding,)}
    return shapes if facts.tied_head else {**shapes, HEAD: table}


def attention_shapes(facts: ModelFacts, layer: int) -> Shapes:
    """Return the tensors of a layer's `_attention`, head norms not included."""
    embedding, groups = facts.embedding, facts.kv_heads[layer]
    return {
        f"blk.{layer}.attn_norm.weight": (embedding,),
        f"blk.{layer}.attn_q.weight": (embedding, facts.heads * facts.key_length),
        f"blk.{layer}.attn_k.weight": (embedding, groups * facts.key_length),
        f"blk.{layer}.attn_v.weight": (embedding, groups * facts.value_length),
        f"blk.{layer}.attn_output.weight": (facts.heads * facts.value_length, embedding),
    }


def routed_ffn_shapes(facts: ModelFacts, layer: int) -> Shapes:
    """Return the tensors of a layer's `_routed_ffn`, a shared expert's not included."""
    embedding, width, experts = facts.embedding, facts.expert_width, facts.experts
    return {
        f"blk.{layer}.ffn_norm.weight": (embedding,),
        f"blk.{layer}.ffn_gate_inp.weight": (embedding, experts),
        f"blk.{layer}.ffn_gate_exps.weight": (embedding, width, experts),
        f"blk.{layer}.ffn_up_exps.weight": (embedding, width, experts),
        f"blk.{layer}.ffn_down_exps.weight": (width, embedding, experts),
    }


def shared_ffn_shapes(facts: ModelFacts, layer: int, *, gated: bool) -> Shapes:
    """Return the tensors of the expert that every token takes; `gated`: with one that says how much of it."""
    embedding, width = facts.embedding, facts.shared_width
    shapes: Shapes = {
        f"blk.{layer}.ffn_gate_shexp.weight": (embedding, width),
        f"blk.{layer}.ffn_up_shexp.weight": (embedding, width),
        f"blk.{layer}.ffn_down_shexp.weight": (width, embedding),
    }
    return shapes | {f"blk.{layer}.ffn_gate_inp_shexp.weight": (embedding,)} if gated else shapes


def dense_ffn_shapes(facts: ModelFacts, layer: int) -> Shapes:
    """Return the tensors of a layer's `_dense_ffn`."""
    embedding, width = facts.embedding, facts.feed_forward
    return {
        f"blk.{layer}.ffn_norm.weight": (embedding,),
        f"blk.{layer}.ffn_gate.weight": (embedding, width),
        f"blk.{layer}.ffn_up.weight": (embedding, width),
        f"blk.{layer}.ffn_down.weight": (width, embedding),
    }
