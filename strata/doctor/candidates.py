"""Candidates for a plan: what each choice of the ladders comes to within given bounds.

A `Rung` fixes everything that is chosen in steps: the prompt chunk, where the embedding lies, and how many experts
may be kept as stored in host memory. What is left over goes to expert slots. For one rung more memory never
gives less of anything, and every rung of a small budget exists in a larger one; so the best candidate never gets worse
when a budget grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from strata.doctor.budgets import Bound, Limits, room
from strata.doctor.experts import ExpertSizes
from strata.doctor.plan import DeviceRef, Reservation, Tier
from strata.doctor.request import Request
from strata.doctor.speed import Placement, Speeds, Traffic

STEPS = 8  # parts in which the experts kept as stored are traded for slots, where both draw on one memory


@dataclass(frozen=True, slots=True)
class Rung:
    """One choice of the ladders. `pinned` and `pageable` are the most experts kept as stored in those tiers."""

    chunk: int
    embedding: Tier
    pinned: int
    pageable: int


class Backend(Protocol):
    """What a plan needs to know of a backend: its memories, and its lines' sizes."""

    device: DeviceRef
    kv_types: tuple[str, ...]  # default first
    embedding_tiers: tuple[Tier, ...]  # best first; the last one costs nothing
    threads: int  # that compute on the host
    minimum_slots: int
    experts: ExpertSizes
    limits: Limits
    speeds: Speeds
    notes: tuple[str, ...]

    def fixed_lines(self, request: Request, chunk: int, embedding: Tier) -> tuple[Reservation, ...]:
        """Return every line but those of the experts, in the order they are taken."""

    def slot_bytes(self, slots: int) -> int:
        """Return the bytes of `slots` ready experts, granularity included; never less for more of them."""

    def stored_bytes(self, experts: int) -> int:
        """Return the bytes that hold any `experts` of them as stored, granularity included."""

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """Return the lines of the experts: ready slots, and as stored by tier."""

    def traffic(self, request: Request) -> Traffic:
        """Return what the forward pass touches."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rung filled up to the bounds. `fits` is False when not even the least does."""

    rung: Rung
    fixed: tuple[Reservation, ...]
    placement: Placement
    fits: bool


def rungs(backend: Backend, request: Request) -> Iterator[Rung]:
    """Return every choice, the most wished for first, so that ties are decided for it."""
    total = backend.experts.total
    pinned = _steps(backend.limits, Tier.PINNED, total)
    pageable = _steps(backend.limits, Tier.PAGEABLE, total)
    for chunk, embedding, p, q in product(request.chunks, backend.embedding_tiers, pinned, pageable):
        yield Rung(chunk, embedding, p, q)


def leanest(backend: Backend, request: Request) -> Rung:
    """Return the choice that needs the least of every memory: if it does not fit, none does."""
    return Rung(request.chunks[-1], backend.embedding_tiers[-1], 0, 0)


def _steps(limits: Limits, tier: Tier, total: int) -> tuple[int, ...]:
    """How many experts to keep as stored in `tier`: what fits, or in steps where slots compete for the memory."""
    shared = any(tier in s.tiers and Tier.VRAM in s.tiers for s in limits.shared)
    capped = any(b.tier is tier and b.usable_bytes == 0 for b in limits.budgets)
    if capped:
        return (0,)
    return tuple(dict.fromkeys(total * step // STEPS for step in range(STEPS + 1))) if shared else (total,)


def fill(
    backend: Backend,
    request: Request,
    bounds: tuple[Bound, ...],
    rung: Rung,
    fixed: tuple[Reservation, ...],
) -> Candidate:
    """Fill a rung: the fewest slots, then experts as stored up to the rung's numbers, then slots with the rest.

    Parameters
    ----------
    bounds : tuple of Bound
    fixed : tuple of Reservation
        `backend.fixed_lines` of the rung.
    """
    used = dict.fromkeys(Tier, 0)
    for line in fixed:
        used[line.tier] += line.bytes
    slots = request.slots or backend.minimum_slots
    used[Tier.VRAM] += backend.slot_bytes(slots)
    fits = all(bound.left(used) >= 0 for bound in bounds)
    total = backend.experts.total
    pinned = pageable = 0
    if fits and total:
        pinned = _most(backend, min(rung.pinned, total), room(bounds, used, Tier.PINNED))
        used[Tier.PINNED] += backend.stored_bytes(pinned)
        pageable = _most(backend, min(rung.pageable, total - pinned), room(bounds, used, Tier.PAGEABLE))
        used[Tier.PAGEABLE] += backend.stored_bytes(pageable)
        if request.slots is None:
            used[Tier.VRAM] -= backend.slot_bytes(slots)
            left = room(bounds, used, Tier.VRAM)
            slots = bisect_right(range(total + 1), left, key=backend.slot_bytes) - 1
    return Candidate(rung, fixed, Placement(rung.chunk, rung.embedding, slots, pinned, pageable), fits)


def _most(backend: Backend, wanted: int, left: int) -> int:
    """The most experts, up to `wanted`, that fit as stored into `left` bytes."""
    if backend.stored_bytes(wanted) <= left:
        return wanted
    return bisect_right(range(wanted + 1), left, key=backend.stored_bytes) - 1
