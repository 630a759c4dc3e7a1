"""Candidates for a plan: what each choice of the ladders comes to within given bounds.

A `Rung` fixes everything that is chosen in steps: the prompt chunk, where the embedding lies, and how many experts
may be kept as stored in host memory. What is left over goes to expert slots. For one rung more memory never
gives less of anything, and every rung of a small budget exists in a larger one; so the best candidate never gets worse
when a budget grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

from strata.doctor.budgets import Bound, Limits, room
from strata.doctor.experts import ExpertSizes
from strata.doctor.plan import DeviceRef, Reservation, SlotClass, Tier
from strata.doctor.request import Request
from strata.doctor.speed import Placement, Speeds, Traffic

STEPS = 4  # parts in which experts kept as stored are traded for slots, where both draw on one short memory


class HostChoice(NamedTuple):
    """Where the embedding lies, and the ring through which experts reach their slots."""

    embedding: Tier
    staging: Tier


@dataclass(frozen=True, slots=True)
class Rung:
    """One choice of the ladders. `pinned` and `pageable` are the most experts kept as stored in those tiers."""

    chunk: int
    host: HostChoice
    pinned: int
    pageable: int


class Backend(Protocol):
    """What a plan needs to know of a backend: its memories, and its lines' sizes."""

    device: DeviceRef
    kv_types: tuple[str, ...]  # default first
    chunks: tuple[int, ...]  # prompt chunks to choose from, largest first
    host_choices: tuple[HostChoice, ...]  # best first; the last one needs the least
    threads: int  # that compute on the host
    minimum_slots: int
    experts: ExpertSizes
    limits: Limits
    speeds: Speeds
    notes: tuple[str, ...]

    def fixed_lines(self, request: Request, chunk: int, host: HostChoice) -> tuple[Reservation, ...]:
        """Return every line but those of the experts, in the order they are taken."""

    def slot_bytes(self, slots: int) -> int:
        """Return the bytes of `slots` ready experts, granularity included; never less for more of them.

        `slots` is between `minimum_slots` and all experts.
        """

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """Return the lines of the experts: ready slots, and as stored by tier."""

    def slot_classes(self, slots: int) -> tuple[SlotClass, ...]:
        """Return how `slots` are shared out among the sizes of experts."""

    def traffic(self, request: Request) -> Traffic:
        """Return what the forward pass touches."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rung filled up to the bounds. `fits` is False when not even the least does."""

    rung: Rung
    fixed: tuple[Reservation, ...]
    placement: Placement
    fits: bool


def candidates(backend: Backend, request: Request, bounds: tuple[Bound, ...]) -> Iterator[Candidate]:
    """Fill every choice, the most wished for first, so that ties are decided for it.

    Experts as stored compete with slots only where a memory is shared and short; where it is not, keeping as many of
    both as fit is best, and nothing else is tried.
    """
    total = backend.experts.total
    steps = [total * step // STEPS for step in range(STEPS + 1)]
    for chunk, host in product(request.chunks, backend.host_choices):
        fixed = backend.fixed_lines(request, chunk, host)
        most = fill(backend, request, bounds, Rung(chunk, host, total, total), fixed)
        yield most
        least = fill(backend, request, bounds, Rung(chunk, host, 0, 0), fixed)
        if least.placement.slots > most.placement.slots:
            for pinned, pageable in product(steps, steps):
                yield fill(backend, request, bounds, Rung(chunk, host, pinned, pageable), fixed)


def leanest(backend: Backend, request: Request) -> Rung:
    """Return the choice that needs the least of every memory: if it does not fit, none does."""
    return Rung(request.chunks[-1], backend.host_choices[-1], 0, 0)


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
        experts = backend.experts
        pinned = min(rung.pinned, experts.held_in(room(bounds, used, Tier.PINNED)))
        used[Tier.PINNED] += experts.held_bytes(pinned)
        pageable = min(rung.pageable, total - pinned, experts.held_in(room(bounds, used, Tier.PAGEABLE)))
        used[Tier.PAGEABLE] += experts.held_bytes(pageable)
        if request.slots is None:
            used[Tier.VRAM] -= backend.slot_bytes(slots)
            slots = _most(backend.slot_bytes, slots, total, room(bounds, used, Tier.VRAM))
        if slots == total:  # nothing is ever missed, so nothing needs to be kept twice
            pinned = pageable = 0
    return Candidate(rung, fixed, Placement(rung.chunk, *rung.host, slots, pinned, pageable), fits)


def _most(nbytes: Callable[[int], int], least: int, wanted: int, left: int) -> int:
    """The largest number, from `least` (which fits) to `wanted`, whose `nbytes` fit into `left`.

    `nbytes` grows almost evenly, so the search starts where a straight line would end and widens from there.
    """
    if nbytes(wanted) <= left:
        return wanted
    low, high, low_bytes = least, wanted, nbytes(least)
    guess = low + (high - low) * (left - low_bytes) // (nbytes(wanted) - low_bytes)
    step = 1
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if nbytes(guess) <= left:
            low, guess = guess, guess + step
        else:
            high, guess = guess, guess - step
        step *= 2
    return low
