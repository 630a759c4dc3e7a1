"""Makes reservations: the rounding that a memory wants, and the lines that every backend has."""

from __future__ import annotations

from dataclasses import dataclass

from strata.doctor.experts import ExpertSizes
from strata.doctor.plan import HOST, Reservation, Tier
from strata.doctor.units import PAGE, round_up
from strata.gguf.footprint import Size
from strata.gguf.model_facts import ModelFacts, TensorGroup


@dataclass(frozen=True, slots=True)
class Lines:
    """Makes the lines of a plan.

    Attributes
    ----------
    device : str
        Id of the device that the vram tier is on.
    step : int
        Bytes that its allocator rounds a block up to.
    alignment : int
        Bytes that an array within a block starts on a multiple of.
    """

    device: str
    step: int
    alignment: int

    def line(self, id: str, what: str, tier: Tier, size: Size, arrays: int = 1) -> Reservation:
        """Make a line that holds `size` in so many arrays, rounded up as its memory wants it; a file's line is not."""
        nbytes, formula = size.bytes, size.formula
        if nbytes and tier is not Tier.FILE:
            step = self.step if tier is Tier.VRAM else PAGE
            nbytes = round_up(nbytes + (arrays - 1) * self.alignment, step)
            formula += f" + {arrays - 1} x {self.alignment}" if arrays > 1 else ""
        device = self.device if tier is Tier.VRAM else HOST
        return Reservation(id=id, what=what, tier=tier, device=device, bytes=nbytes, formula=formula)

    def host_lines(self, model: ModelFacts, embedding: Tier, staging: Tier, ring: Size) -> tuple[Reservation, ...]:
        """Make the lines of embedding and staging ring, and of what stays in the file whatever the plan."""
        return (
            self.line("embedding", "token embedding", embedding, _stored(model.embedding_table)),
            self.line("staging_ring", "experts on their way to a slot", staging, ring),
            self.line("row_tables", "tables read by the row, left in the file", Tier.FILE, _stored(model.row_tables)),
            self.line("draft_layers", "draft layers, not used", Tier.FILE, _stored(model.draft)),
        )

    def stored_experts(self, experts: ExpertSizes, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """Make the lines of the experts as stored, by where they lie."""
        in_file = experts.total - pinned - pageable
        each = f"experts of at most {experts.largest_stored_bytes:,} bytes"
        file = round(experts.stored_bytes * in_file / max(experts.total, 1))
        return (
            self.line(
                "experts_pageable",
                "experts as stored",
                Tier.PAGEABLE,
                Size(experts.held_bytes(pageable), f"{pageable:,} {each}"),
            ),
            self.line(
                "experts_pinned",
                "experts as stored, page-locked",
                Tier.PINNED,
                Size(experts.held_bytes(pinned), f"{pinned:,} {each}"),
            ),
            self.line(
                "experts_file",
                "experts read from the file when missed",
                Tier.FILE,
                Size(file, f"{in_file:,} of {experts.total:,} experts"),
            ),
        )


def recurrent_state(model: ModelFacts) -> Size:
    """Bytes of the states of one sequence that do not grow with the context."""
    return Size(model.recurrent_state_bytes, "states and convolution windows of all recurrent layers")


def _stored(group: TensorGroup) -> Size:
    return Size(group.bytes, f"{group.elements:,} weights as stored")
