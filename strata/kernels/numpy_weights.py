"""How the numpy backend holds what it computes with: embedding tables as stored, and the pool of expert slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantRows:
    """A table that stays quantised, for gathering rows: `raw` uint8 [V, bytes per row] of the tensor type `type`."""

    raw: NDArray[np.uint8]
    type: str


@dataclass(frozen=True, slots=True)
class NumpySlots:
    """The pool of ready experts, in float32: `gate_up` [slots, 2F, E], gate rows first, and `down` [slots, E, F]."""

    gate_up: NDArray[np.float32]
    down: NDArray[np.float32]

    @classmethod
    def over(cls, pool: NDArray[np.float32], embedding: int, width: int) -> NumpySlots:
        """View a pool float32 [slots, values per slot] as experts.

        Gate and up start each slot, down ends it; a slot padded to cache lines has its padding between and after.

        Parameters
        ----------
        pool : NDArray[np.float32], shape (slots, values per slot)
            Rows of `strata.gguf.footprint.expert_slot_size` bytes.
        embedding, width : int
            E and F.
        """
        matrix = embedding * width
        line = 64 // pool.itemsize
        start = -(-2 * matrix // line) * line
        if pool.shape[1] < start + matrix:
            raise ValueError(f"a slot of {pool.shape[1]} values holds no expert of {embedding} x {width}")
        return cls(
            pool[:, : 2 * matrix].reshape(-1, 2 * width, embedding),
            pool[:, start : start + matrix].reshape(-1, embedding, width),
        )
