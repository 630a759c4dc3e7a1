"""The operations an architecture is written in, defined once for every backend.

An op is coarse (a fused kernel's worth of work), works on preallocated buffers and returns nothing, so the
same model code runs eagerly on numpy and can be captured into a graph on a GPU. `numpy_ops` is the
definition of every op; any other backend is measured against it.

Shapes use one letter a dimension: T tokens of this call, E hidden size, H heads, G KV heads, D head size,
V vocabulary, N experts of a layer, K experts per token (top-k), F expert width, S KV cells.
Activations and the residual stream are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any  # numpy.ndarray or the backend's own array
Position: TypeAlias = Any  # of the first token; numpy: an int; a GPU: int32 [1] in its memory, for graphs
Weight: TypeAlias = Any  # a backend's prepared weight; numpy: float32 [out, in], C-contiguous


class RopeStyle(StrEnum):
    """How rotary pairs lie in a head: ``norm`` pairs (2i, 2i+1), ``neox`` pairs (i, i + n/2)."""

    NORM = "norm"
    NEOX = "neox"


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Attributes
    ----------
    style : RopeStyle
    dims : int
        How many leading dimensions of a head are rotated.
    inverse_frequencies : Array
        float32 [dims / 2]; ``base ** (-2i / dims)`` with any scaling already applied.
    """

    style: RopeStyle
    dims: int
    inverse_frequencies: Array


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's slice of the KV cache: `keys` [S, G, D] and `values` [S, G, Dv], f16 or f32."""

    keys: Array
    values: Array


@dataclass(frozen=True, slots=True)
class ExpertWave:
    """Experts whose slots are ready at the same time, and who asked for them.

    A layer call goes in one wave when all its experts fit into the slots, else in several. `slots[i]` holds
    expert i of the wave; `tokens[i]` and `ranks[i]` (equal lengths) are the (token, rank) pairs it serves.
    """

    slots: Sequence[int]
    tokens: Sequence[Array]
    ranks: Sequence[Array]


class Ops(Protocol):
    """Every operation the architectures need. See `numpy_ops.NumpyOps` for the exact arithmetic."""

    def embed(self, table: Weight, tokens: Array, out: Array, *, scale: float = 1.0) -> None:
        """``out[t] = scale * table[tokens[t]]``; out [T, E]."""

    def norm_project(
        self,
        x: Array,
        norm: Weight,
        eps: float,
        weights: Sequence[Weight],
        outs: Sequence[Array],
        biases: Sequence[Weight] | None = None,
    ) -> None:
        """RMS-norm `x` [T, E] by `norm`, then ``outs[i] = normed @ weights[i].T + biases[i]`` for each weight."""

    def norm_rows(self, rows: Sequence[Array], norms: Sequence[Weight], eps: float) -> None:
        """RMS-norm each of one or two arrays [T, its width] by a norm of that width, in place."""

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: tuple[Weight, Weight] | None,
        eps: float,
        rope: Rope,
        position: Position,
        kv: KvLayer,
        scale: float,
        out: Array,
    ) -> None:
        """Append to the KV cache, then attend causally over all of it: token t over cells ``0 .. position + t``.

        q [T, H, D], k [T, G, D] and v [T, G, Dv] are as projected, and may be changed: per-head RMS-norm of q and k
        when `norms` is given, then both rotated; k and v go to cells `position` onwards of `kv`; out [T, H, Dv].
        """

    def project_add(self, x: Array, weight: Weight, residual: Array, *, scale: float = 1.0) -> None:
        """``residual += scale * (x @ weight.T)``."""

    def dense_ffn(self, x: Array, norm: Weight, eps: float, gate: Weight, up: Weight, down: Weight) -> None:
        """``x += down(silu(gate h) * up h)`` with ``h = rms(x, norm)``; x [T, E] is the residual stream."""

    def shared_ffn(
        self,
        hidden: Array,
        share: Weight | None,
        gate: Weight,
        up: Weight,
        down: Weight,
        residual: Array,
        *,
        scale: float = 1.0,
    ) -> None:
        """Add an expert that every token takes: ``residual += scale * s * down(silu(gate h) * up h)``.

        `hidden` [T, E] has the rows h, as `route` writes them; s is ``sigmoid(h @ share)`` with `share` [E], or 1.
        """

    def route(
        self,
        x: Array,
        norm: Weight,
        eps: float,
        router: Weight,
        normalise: bool,
        hidden: Array,
        ids: Array,
        weights: Array,
        *,
        scale: float = 1.0,
    ) -> None:
        """Choose the experts: softmax over all N router logits, top-k, best first, ties to the lower index.

        Writes ``hidden = rms(x, norm)`` [T, E], `ids` int32 [T, K] and `weights` float32 [T, K]; with
        `normalise` the K weights are divided by their sum. Either way they are then multiplied by `scale`.
        """

    def head(self, x: Array, norm: Weight, eps: float, weight: Weight, logits: Array, *, scale: float = 1.0) -> None:
        """``logits = scale * (rms(x, norm) @ weight.T)``; x [T, E], logits [T, V]."""


class WaveOps(Ops, Protocol):
    """What a backend offers besides, whose experts go in waves: no more of them at once than there are slots."""

    def expert_ffn(self, hidden: Array, slots: Array, wave: ExpertWave, results: Array) -> None:
        """Run each expert of the wave on its tokens: ``results[t, rank] = down(silu(gate h_t) * up h_t)``.

        `slots` is the backend's pool of ready experts; results [T, K, E] has one row per (token, rank), so
        nothing depends on the order in which experts run.
        """

    def combine(self, results: Array, weights: Array, residual: Array) -> None:
        """``residual[t] += sum over ranks, in rank order, of weights[t, r] * results[t, r]``; `results` is spent."""
