"""Routed experts on the numpy backend: each expert's tokens gathered, multiplied, and put where they belong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from strata.kernels.numpy_math import Floats, gated, product, vector_product
from strata.kernels.numpy_weights import NumpySlots
from strata.kernels.ops import Array, ExpertWave
from strata.kernels.workers import Task, Workers


class NumpyExperts:
    """The experts of a wave, in the scratch of a workspace; every expert's products keep their own shape."""

    def __init__(self, workspace: Mapping[str, Floats], workers: Workers) -> None:
        self._rows = workspace["ops.expert_rows"]  # [threads, tokens, E]
        self._gate_up = workspace["ops.expert_gate_up"]  # [threads, tokens, 2F]
        self._activation = workspace["ops.expert_activation"]  # [threads, tokens, F]
        self._workers = workers

    def __call__(self, hidden: Floats, slots: NumpySlots, wave: ExpertWave, results: Floats) -> None:
        """See `strata.kernels.ops.WaveOps.expert_ffn`."""
        pairs = sum(map(len, wave.tokens))
        tasks = (
            self._decode(hidden, slots, wave, results)
            if len(hidden) == 1
            else self._prefill(hidden, slots, wave, results)
        )
        self._workers.run(tasks, pairs * 3 * slots.down[0].size)

    def _decode(self, hidden: Floats, slots: NumpySlots, wave: ExpertWave, results: Floats) -> Sequence[Task]:
        """One token: a share of the experts per thread, in slot order so that neighbours go in one call."""
        pairs = sorted((int(slot), int(ranks[0])) for slot, ranks in zip(wave.slots, wave.ranks, strict=True))
        shares = min(self._workers.threads, len(pairs))
        cuts = [share * len(pairs) // shares for share in range(shares + 1)]
        return [
            partial(self._one_token, hidden[0], slots, pairs[start:stop], results[0])
            for start, stop in itertools.pairwise(cuts)
        ]

    def _one_token(
        self, hidden: Floats, slots: NumpySlots, pairs: Sequence[tuple[int, int]], results: Floats, worker: int
    ) -> None:
        scratch = (self._gate_up, self._activation, self._rows)
        gate_up, activation, rows = (each[worker, : len(pairs)] for each in scratch)
        runs = _runs([slot for slot, _ in pairs])
        for at, run in runs:
            vector_product(slots.gate_up[run], hidden, gate_up[at])
        width = activation.shape[-1]
        gated(gate_up[:, :width], gate_up[:, width:], activation)
        for at, run in runs:
            vector_product(slots.down[run], activation[at, None], rows[at])
        results[[rank for _, rank in pairs]] = rows

    def _prefill(self, hidden: Floats, slots: NumpySlots, wave: ExpertWave, results: Floats) -> Sequence[Task]:
        """Many tokens: one task per expert and block of its tokens, the largest first."""
        block = self._rows.shape[1]
        work = sorted(zip(wave.slots, wave.tokens, wave.ranks, strict=True), key=lambda item: -len(item[1]))
        return [
            partial(
                self._many_tokens,
                hidden,
                slots,
                slot,
                tokens[start : start + block],
                ranks[start : start + block],
                results,
            )
            for slot, tokens, ranks in work
            for start in range(0, len(tokens), block)
        ]

    def _many_tokens(
        self, hidden: Floats, slots: NumpySlots, slot: int, tokens: Array, ranks: Array, results: Floats, worker: int
    ) -> None:
        scratch = (self._rows, self._gate_up, self._activation)
        rows, gate_up, activation = (each[worker, : len(tokens)] for each in scratch)
        np.take(hidden, tokens, axis=0, out=rows, mode="clip")  # "raise", the default, would buffer
        product(rows, slots.gate_up[slot], gate_up)
        width = activation.shape[-1]
        gated(gate_up[:, :width], gate_up[:, width:], activation)
        product(activation, slots.down[slot], rows)
        results[tokens, ranks] = rows


def _runs(slots: Sequence[int]) -> list[tuple[slice, slice]]:
    """Group ascending slots into runs of neighbours: (where in `slots`, which slots)."""
    starts = [0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), len(slots)]
    return [
        (slice(start, stop), slice(slots[start], slots[start] + stop - start))
        for start, stop in itertools.pairwise(starts)
    ]
