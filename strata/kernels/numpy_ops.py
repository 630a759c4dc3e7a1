"""The definition of every op: NumPy, float32. Any other backend is measured against this one.

Weights are float32 [out, in], C-contiguous. All scratch comes from the workspace that
`strata.gguf.footprint.workspace` lists. Where a product is cut into pieces, the cut depends on shapes alone, so
the bits of a result depend neither on the number of threads nor on the slot an expert lies in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strata.kernels.dequant import dequantise
from strata.kernels.numpy_attention import NumpyAttention
from strata.kernels.numpy_experts import NumpyExperts
from strata.kernels.numpy_math import Floats, gated, product, rms_norm, sigmoid
from strata.kernels.numpy_weights import NumpySlots, QuantRows
from strata.kernels.ops import ExpertWave, KvLayer, Rope, RopeStyle
from strata.kernels.workers import WORTH_A_THREAD, Task, Workers

_PIECE_ROWS = 256  # fewest weight rows of a piece: fewer make a matrix product slow


class NumpyOps:
    """`strata.kernels.ops.Ops` on the CPU.

    Parameters
    ----------
    workspace : mapping of str to NDArray
        The arrays of `strata.gguf.footprint.workspace`; those named ``ops.*`` are used here. Their first
        dimension is the number of threads where each thread has its own.
    """

    def __init__(self, workspace: Mapping[str, Floats]) -> None:
        self._workers = Workers(len(workspace["ops.scores"]))
        self._rows = workspace["ops.rows"]
        self._rotated = workspace["ops.rotated"]
        self._angles = workspace["ops.angles"].view(np.complex64)
        self._angles_of: tuple[int, int, int] | None = None
        self._attention = NumpyAttention(workspace, self._workers)
        if "ops.router" in workspace:
            self._router = workspace["ops.router"]
            self._experts = NumpyExperts(workspace, self._workers)
        if "ops.gate_up" in workspace:
            self._gate, self._up = workspace["ops.gate_up"]
            self._activation = workspace["ops.activation"]

    def embed(self, table: Floats | QuantRows, tokens: NDArray[np.int32], out: Floats, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.embed`."""
        if isinstance(table, QuantRows):
            dequantise(table.raw[tokens], table.type, out)
        else:
            np.take(table, tokens, axis=0, out=out)
        _scale(out, scale)

    def norm_project(
        self,
        x: Floats,
        norm: Floats,
        eps: float,
        weights: Sequence[Floats],
        outs: Sequence[Floats],
        biases: Sequence[Floats] | None = None,
    ) -> None:
        """See `strata.kernels.ops.Ops.norm_project`."""
        normed = self._rows[: len(x)]
        rms_norm(x, norm, eps, normed)
        self._products(normed, weights, outs)
        for out, bias in zip(outs, biases or (), strict=False):
            out += bias

    def norm_rows(self, rows: Sequence[Floats], norms: Sequence[Floats], eps: float) -> None:
        """See `strata.kernels.ops.Ops.norm_rows`."""
        for x, norm in zip(rows, norms, strict=True):
            rms_norm(x, norm, eps, x)

    def attention(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        norms: tuple[Floats, Floats] | None,
        eps: float,
        rope: Rope,
        position: int,
        kv: KvLayer,
        scale: float,
        out: Floats,
    ) -> None:
        """See `strata.kernels.ops.Ops.attention`."""
        self.rope_append(q, k, v, norms, eps, rope, position, kv)
        self.attend(q, kv, position, scale, out)

    def rope_append(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        norms: tuple[Floats, Floats] | None,
        eps: float,
        rope: Rope,
        position: int,
        kv: KvLayer,
    ) -> None:
        """Norm, rotate and append: attention's first half. Angles are float32 products of position and frequency."""
        if norms is not None:
            rms_norm(q, norms[0], eps, q)
            rms_norm(k, norms[1], eps, k)
        turns = self._turns(rope, position, len(q))
        self._rotate(q, rope, turns)
        self._rotate(k, rope, turns)
        kv.keys[position : position + len(k)] = k
        kv.values[position : position + len(v)] = v

    def attend(self, q: Floats, kv: KvLayer, position: int, scale: float, out: Floats) -> None:
        """Attend over cells ``0 .. position + t``: attention's second half."""
        self._attention(q, kv, position, scale, out)

    def project_add(self, x: Floats, weight: Floats, residual: Floats, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.project_add`."""
        added = self._rows[: len(x)]
        self._products(x, [weight], [added])
        residual += _scale(added, scale)

    def dense_ffn(self, x: Floats, norm: Floats, eps: float, gate: Floats, up: Floats, down: Floats) -> None:
        """See `strata.kernels.ops.Ops.dense_ffn`."""
        block = len(self._activation)
        for start in range(0, len(x), block):
            tokens = x[start : start + block]
            rows = self._rows[: len(tokens)]
            rms_norm(tokens, norm, eps, rows)
            self._products(self._gated(rows, gate, up), [down], [rows])
            tokens += rows

    def shared_ffn(
        self,
        hidden: Floats,
        share: Floats | None,
        gate: Floats,
        up: Floats,
        down: Floats,
        residual: Floats,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `strata.kernels.ops.Ops.shared_ffn`."""
        block = len(self._activation)
        for start in range(0, len(hidden), block):
            tokens = hidden[start : start + block]
            rows = self._rows[: len(tokens)]
            self._products(self._gated(tokens, gate, up), [down], [rows])
            if share is not None:
                rows *= sigmoid(tokens @ share)[:, None]
            residual[start : start + block] += _scale(rows, scale)

    def _gated(self, rows: Floats, gate: Floats, up: Floats) -> Floats:
        """Return ``silu(gate h) * up h`` of each row h, in scratch."""
        gates, ups, activation = (each[: len(rows)] for each in (self._gate, self._up, self._activation))
        self._products(rows, [gate, up], [gates, ups])
        gated(gates, ups, activation)
        return activation

    def route(
        self,
        x: Floats,
        norm: Floats,
        eps: float,
        router: Floats,
        normalise: bool,
        hidden: Floats,
        ids: NDArray[np.int32],
        weights: Floats,
        *,
        scale: float = 1.0,
    ) -> None:
        """See `strata.kernels.ops.Ops.route`."""
        rms_norm(x, norm, eps, hidden)
        logits = self._router[: len(x)]
        self._products(hidden, [router], [logits])
        # A stable ascending sort of the negated logits: best first, ties by index. Softmax keeps the order.
        np.negative(logits, out=logits)
        best = logits.argsort(axis=-1, kind="stable")[:, : ids.shape[1]]
        ids[:] = best
        chosen = logits[np.arange(len(x))[:, None], best]
        highest = chosen[:, :1]
        np.exp(highest - chosen, out=weights)
        # Dividing by the sum over all N first would cancel out when the K weights are made to sum to 1.
        among = weights if normalise else np.exp(np.subtract(highest, logits, out=logits), out=logits)
        weights /= among.sum(axis=-1, keepdims=True)
        _scale(weights, scale)

    def expert_ffn(self, hidden: Floats, slots: NumpySlots, wave: ExpertWave, results: Floats) -> None:
        """See `strata.kernels.ops.WaveOps.expert_ffn`."""
        self._experts(hidden, slots, wave, results)

    def combine(self, results: Floats, weights: Floats, residual: Floats) -> None:
        """See `strata.kernels.ops.WaveOps.combine`."""
        results *= weights[..., None]
        residual += results.sum(axis=1, out=self._rows[: len(residual)])  # whole rows are added one after another

    def head(self, x: Floats, norm: Floats, eps: float, weight: Floats, logits: Floats, *, scale: float = 1.0) -> None:
        """See `strata.kernels.ops.Ops.head`."""
        self.norm_project(x, norm, eps, [weight], [logits])
        _scale(logits, scale)

    def _products(self, x: Floats, weights: Sequence[Floats], outs: Sequence[Floats]) -> None:
        """``outs[i] = x @ weights[i].T``: small ones right here, large ones in pieces of whole weight rows."""
        multiplications = len(x) * sum(weight.size for weight in weights)
        if multiplications < WORTH_A_THREAD:
            for weight, out in zip(weights, outs, strict=True):
                product(x, weight, out)
            return
        pieces: list[Task] = []
        rows = max(_PIECE_ROWS, WORTH_A_THREAD // x.size)
        for weight, out in zip(weights, outs, strict=True):
            for start in range(0, len(weight), rows):
                piece = slice(start, start + rows)
                pieces.append(partial(_product_piece, x, weight[piece], out[:, piece]))
        self._workers.run(pieces, multiplications)

    def _turns(self, rope: Rope, position: int, tokens: int) -> NDArray[np.complex64]:
        """Cosines and sines [T, 1, dims / 2] of a call as complex numbers, computed once for all its layers."""
        turns = self._angles[:tokens, : rope.dims // 2]
        call = (id(rope), position, tokens)
        if call != self._angles_of:
            angles = np.arange(position, position + tokens, dtype=np.float32)[:, None] * rope.inverse_frequencies
            np.cos(angles, out=turns.real)
            np.sin(angles, out=turns.imag)
            self._angles_of = call
        return turns[:, None]

    def _rotate(self, heads: Floats, rope: Rope, turns: NDArray[np.complex64]) -> None:
        """Rotate the pairs of each head [T, heads, D] in place."""
        if rope.style is RopeStyle.NORM:
            pairs = heads[..., : rope.dims].view(np.complex64)  # neighbours: a complex number each
            pairs *= turns
            return
        half = rope.dims // 2
        first, second = heads[..., :half], heads[..., half : rope.dims]
        onto_first, onto_second = self._rotated[:, : first.size].reshape(2, *first.shape)
        np.multiply(second, turns.imag, out=onto_first)
        np.multiply(first, turns.imag, out=onto_second)
        first *= turns.real
        first -= onto_first
        second *= turns.real
        second += onto_second


def _scale(x: Floats, scale: float) -> Floats:
    """Multiply in place; most models have no scales."""
    if scale != 1.0:
        x *= np.float32(scale)
    return x


def _product_piece(x: Floats, weight: Floats, out: Floats, worker: int) -> None:
    product(x, weight, out)
