"""From logits to the next token: the definition that every backend's sampler must reproduce.

Order, as in llama.cpp's default chain: top-k, top-p, min-p, then temperature. So the filters judge the model's own
probabilities (temperature 1), and temperature only reshapes what they let through.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.errors import StrataError, UsageError
from strata.kernels.philox import uniform

_STRETCH = 64  # logits
_BINS, _BINS_PER_UNIT = 2048, 64  # the last one takes all that is 32 and more below the likeliest


class SamplerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. The defaults choose the likeliest one, always.

    Attributes
    ----------
    temperature : float
        0 chooses the likeliest token (greedy, the lowest id of equals); otherwise logits are divided by it.
    top_k : int
        Keep the k likeliest tokens, of equals at the edge the lowest ids; 0 keeps all.
    top_p : float
        Keep the likeliest tokens until their probabilities reach this sum, in (0, 1]; 1 keeps all. Probabilities
        are those among the tokens that top-k kept.
    min_p : float
        Keep tokens with at least this fraction of the likeliest one's probability, in [0, 1]; 0 keeps all.
    seed : int
        0 to 2**64 - 1. The same seed gives the same draw at the same position.

    Raises
    ------
    UsageError
        A value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "--temp", self.temperature, "finite, and 0 (greedy) or more", "0.8")
        _require(self.top_k >= 0, "--top-k", self.top_k, "0 (off) or more", "40")
        _require(0 < self.top_p <= 1, "--top-p", self.top_p, "above 0 and at most 1 (off)", "0.95")
        _require(0 <= self.min_p <= 1, "--min-p", self.min_p, "from 0 (off) to 1", "0.05")
        _require(0 <= self.seed < 1 << 64, "--seed", self.seed, "from 0 to 2**64 - 1", "1")


class Sampler:
    """Chooses tokens by one set of options; it has no state, so a position can be drawn again.

    Parameters
    ----------
    options : SamplerOptions
    """

    def __init__(self, options: SamplerOptions) -> None:
        self.options = options

    def __call__(self, logits: NDArray[np.float32], position: int) -> int:
        """Choose the token that follows.

        Parameters
        ----------
        logits : NDArray[np.float32], shape (V,)
            Minus infinity excludes a token.
        position : int
            Absolute position of the chosen token in its sequence.

        Returns
        -------
        int
            Its id.

        Raises
        ------
        StrataError
            The logits hold NaN or plus infinity, or exclude every token.
        """
        best = int(np.argmax(logits))  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise StrataError(
                f"choose the token at position {position}",
                f"the best of the model's {len(logits):,} logits is {logits[best]} (token {best})",
                "The weights are damaged or this is a bug of Strata's: compare with --device cpu and report it",
            )
        if self.options.temperature == 0:
            return best
        ids = self._candidates(logits)
        weights = np.exp((logits[ids].astype(np.float64) - float(logits[best])) / self.options.temperature)
        # Inverse of the cumulative distribution in order of ids, in float64. A draw below 1 times the total always
        # rounds below the total, so an id is always found, and one of weight 0 never is.
        cumulative = np.cumsum(weights)
        drawn = np.searchsorted(cumulative, uniform(self.options.seed, position) * cumulative[-1], side="right")
        return int(ids[drawn])

    def _candidates(self, logits: NDArray[np.float32]) -> NDArray[np.intp]:
        """Ids that all filters keep, ascending; never empty."""
        options = self.options
        ids = np.arange(len(logits))
        if 0 < options.top_k < len(ids):
            edge = _kth_largest(logits, options.top_k)
            above, equal = np.flatnonzero(logits > edge), np.flatnonzero(logits == edge)
            ids = np.sort(np.concatenate([above, equal[: options.top_k - len(above)]]))
        if options.top_p < 1:
            ids = _likeliest(logits, ids, options.top_p)
        if options.min_p > 0:
            kept = logits[ids].astype(np.float64)
            ids = ids[kept >= kept.max() + math.log(options.min_p)]
        return ids


def _likeliest(logits: NDArray[np.float32], ids: NDArray[np.intp], share: float) -> NDArray[np.intp]:
    """Of `ids` (ascending), the likeliest whose probabilities among them reach `share`; of equals the lowest ids.

    Sums of narrow bins of logits tell in which one the share is reached, and only that one is sorted: a vocabulary of
    150,000 takes 20 ms to sort.
    """
    values = logits[ids]
    below = values.max() - values
    odds = np.exp(-below.astype(np.float64))
    bins = np.minimum(below * _BINS_PER_UNIT, _BINS - 1).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, odds))
    goal = share * reached[-1]
    edge = int(np.searchsorted(reached, goal))
    within = np.flatnonzero(bins == edge)
    within = within[np.argsort(below[within], kind="stable")]
    rest = goal - (reached[edge - 1] if edge else 0)
    count = int(np.searchsorted(np.cumsum(odds[within]), rest)) + 1
    return np.sort(ids[np.concatenate([np.flatnonzero(bins < edge), within[:count]])])


def _kth_largest(values: NDArray[np.float32], k: int) -> np.float32:
    """Return the k-th largest of `values`, `k` of them at most.

    The k-th largest of the maxima of stretches bounds it from below, so that only few values are left to be sorted: a
    fifth of a partition's time for a vocabulary of 150,000.
    """
    whole = len(values) // _STRETCH * _STRETCH
    maxima = values[:whole].reshape(-1, _STRETCH).max(axis=1)
    if len(maxima) >= k:
        values = values[values >= np.partition(maxima, -k)[-k]]
    best: np.float32 = np.partition(values, -k)[-k]
    return best


def _require(valid: bool, option: str, value: float, allowed: str, example: str) -> None:
    if not valid:
        raise UsageError(f"{option} {value}", f"it must be {allowed}", f"For example {option} {example}")
