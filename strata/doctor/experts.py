"""Sizes of a model's routed experts, counted for any number of them."""

from __future__ import annotations

from dataclasses import dataclass

from strata.doctor.units import PAGE, round_up
from strata.gguf.model_facts import ExpertClass, ModelFacts


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """All routed experts of a model, by size class, those with the largest stored experts first."""

    classes: tuple[ExpertClass, ...]
    total: int  # experts of the model: the sum over its layers
    _sizes: tuple[tuple[int, int], ...]  # experts and bytes of one, by class

    @classmethod
    def of(cls, model: ModelFacts) -> ExpertSizes:
        """Take the classes from a model's facts."""
        classes = tuple(sorted(model.expert_classes, key=lambda c: (-c.bytes, c.layers)))
        sizes = tuple((len(c.layers) * c.experts_per_layer, c.bytes) for c in classes)
        return cls(classes, sum(number for number, _ in sizes), sizes)

    @property
    def layers(self) -> int:
        """Layers that have routed experts."""
        return sum(len(c.layers) for c in self.classes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts as stored."""
        return sum(number * nbytes for number, nbytes in self._sizes)

    @property
    def largest_stored_bytes(self) -> int:
        """Bytes of the largest expert as stored."""
        return max((c.bytes for c in self.classes), default=0)

    def held_bytes(self, experts: int) -> int:
        """Return the bytes of RAM that hold any `experts` of them as stored, in whole pages.

        Which ones is decided at load, so the largest count.
        """
        left, total = experts, 0
        for number, nbytes in self._sizes:
            taken = min(left, number)
            total += taken * nbytes
            left -= taken
        return round_up(total, PAGE)

    def held_in(self, nbytes: int) -> int:
        """Return how many experts `nbytes` of RAM hold for sure: the inverse of `held_bytes`."""
        left, total = nbytes // PAGE * PAGE, 0
        for number, each in self._sizes:
            taken = min(number, left // each)
            total += taken
            left -= taken * each
            if taken < number:
                break
        return total

    def spread(self, slots: int, least: int) -> tuple[int, ...]:
        """Share slots out among the classes: `least` each, the others in proportion to their experts.

        The others go one by one to the class that has the fewest for its size (d'Hondt's method, in closed form but for
        the last few), so that one more slot never takes one from any class.

        Parameters
        ----------
        slots : int
            Between `least` for each class and all experts.
        """
        weights = [number - least for number, _ in self._sizes]
        rest = slots - least * len(weights)
        whole = sum(weights)
        shares = [rest * weight // whole for weight in weights] if whole else [0] * len(weights)
        for _ in range(rest - sum(shares)):
            poorest = min((i for i, w in enumerate(weights) if w), key=lambda i: (shares[i] + 1) / weights[i])
            shares[poorest] += 1
        return tuple(least + share for share in shares)
