"""Sizes of a model's routed experts, counted for any number of them."""

from __future__ import annotations

from dataclasses import dataclass

from strata.gguf.model_facts import ExpertClass, ModelFacts


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """All routed experts of a model, by size class."""

    classes: tuple[ExpertClass, ...]

    @classmethod
    def of(cls, model: ModelFacts) -> ExpertSizes:
        """Take the classes from a model's facts, those with the largest stored experts first."""
        return cls(tuple(sorted(model.expert_classes, key=lambda c: (-c.bytes, c.layers))))

    @property
    def total(self) -> int:
        """Experts of the model: the sum over its layers."""
        return sum(count(c) for c in self.classes)

    @property
    def layers(self) -> int:
        """Layers that have routed experts."""
        return sum(len(c.layers) for c in self.classes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts as stored."""
        return sum(count(c) * c.bytes for c in self.classes)

    @property
    def largest_stored_bytes(self) -> int:
        """Bytes of the largest expert as stored."""
        return max((c.bytes for c in self.classes), default=0)

    def most_bytes(self, experts: int) -> int:
        """Return the most bytes that any `experts` of them take as stored: which ones is decided at load."""
        left, total = experts, 0
        for c in self.classes:
            taken = min(left, count(c))
            total += taken * c.bytes
            left -= taken
        return total


def count(c: ExpertClass) -> int:
    """Return the experts of one class in all its layers."""
    return len(c.layers) * c.experts_per_layer
