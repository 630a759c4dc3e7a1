"""Candidates for a plan: what each choice of the ladders comes to within given bounds.

A choice fixes everything that is chosen in steps: the prompt chunk, where the embedding lies, and how many experts
are kept as stored in host memory. Slots take what is left. The steps do not depend on the budgets, so every choice
that a budget allows is allowed by a larger one, with no fewer slots; hence the best score never gets worse when
a budget grows. What memory the steps leave over is filled last (`topped_up`), which no score counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, Protocol

from strata.doctor.budgets import Bound, Limits, room
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts
from strata.doctor.plan import DeviceRef, PlanOptions, Reservation, SlotClass, Tier
from strata.doctor.request import Request
from strata.doctor.speed import PROMPT, Placement, Speeds, Traffic

STEPS = 8  # parts of all experts, in which those kept as stored are counted


class HostChoice(NamedTuple):
    """Where the embedding lies, and the ring through which experts reach their slots."""

    embedding: Tier
    staging: Tier


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
    notes: tuple[str, ...]
    measured_lines: tuple[str, ...]  # ids of lines that are as large as the facts say, not as the plan chose

    def among(self, facts: Facts, options: PlanOptions) -> Backend:
        """Return the same device and model among other memories, or under other options.

        Raises what making it anew would.
        """

    @property
    def speeds(self) -> Speeds:
        """Return how fast the memories are, and on what that rests."""

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

    def traffic(self, request: Request, prompt: int = PROMPT) -> Traffic:
        """Return what the forward pass touches: reading a prompt of `prompt` tokens, and answering after it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice and the slots that it leaves room for. `fits` is False when not even the fewest have any."""

    fixed: tuple[Reservation, ...]
    placement: Placement
    fits: bool


def candidates(backend: Backend, request: Request, bounds: tuple[Bound, ...]) -> Iterator[Candidate]:
    """Return every choice that fits and could be best, in a fixed order."""
    steps = [backend.experts.total * step // STEPS for step in range(STEPS + 1)]
    for chunk, host in product(request.chunks, backend.host_choices):
        rung = _Rung.of(backend, request, bounds, chunk, host)
        for pinned in dict.fromkeys(steps):
            most = rung.candidate(pinned, 0)
            if not most.fits:
                break
            if _runs(backend, request, most.placement):
                yield most
            for step in reversed(steps[1:]):
                c = rung.candidate(pinned, min(step, backend.experts.total - pinned))
                if not c.fits:
                    continue
                if _runs(backend, request, c.placement):
                    yield c
                if c.placement.slots == most.placement.slots:
                    break  # keeping fewer would not gain a slot


def _runs(backend: Backend, request: Request, where: Placement) -> bool:
    """Return whether chunks of that size are run: where experts may be missed, a backend may have none so large."""
    if where.slots == backend.experts.total or len(request.chunks) == 1:  # one that the person chose
        return True
    return not backend.speeds.call_tokens or where.chunk <= backend.speeds.call_tokens


def leanest(backend: Backend, request: Request, bounds: tuple[Bound, ...]) -> Candidate:
    """Return the choice that needs the least of every memory: if it does not fit, none does."""
    return _Rung.of(backend, request, bounds, request.chunks[-1], backend.host_choices[-1]).candidate(0, 0)


@dataclass(frozen=True, slots=True)
class _Rung:
    """A chunk and a host choice with the lines that both fix; `used` are their bytes and those of the fewest slots."""

    backend: Backend
    bounds: tuple[Bound, ...]
    chunk: int
    host: HostChoice
    fixed: tuple[Reservation, ...]
    used: dict[Tier, int]
    slots: int
    exact: bool  # no more slots than `slots` are wanted

    @classmethod
    def of(cls, backend: Backend, request: Request, bounds: tuple[Bound, ...], chunk: int, host: HostChoice) -> _Rung:
        slots = request.slots or backend.minimum_slots
        fixed = backend.fixed_lines(request, chunk, host)
        used = _used(backend, fixed, Placement(chunk, *host, slots, 0, 0))
        return cls(backend, bounds, chunk, host, fixed, used, slots, request.slots is not None)

    def candidate(self, pinned: int, pageable: int) -> Candidate:
        """Keep so many experts as stored, and give all the slots that fit beside them."""
        experts, slots = self.backend.experts, self.slots
        used = self.used.copy()
        used[Tier.PINNED] += experts.held_bytes(pinned)
        used[Tier.PAGEABLE] += experts.held_bytes(pageable)
        fits = all(bound.left(used) >= 0 for bound in self.bounds)
        if fits and not self.exact:
            slot_bytes = self.backend.slot_bytes
            left = room(self.bounds, used, Tier.VRAM) + slot_bytes(slots)
            slots = _most(slot_bytes, slots, experts.total, left)
        return Candidate(self.fixed, Placement(self.chunk, *self.host, slots, pinned, pageable), fits)


def topped_up(backend: Backend, bounds: tuple[Bound, ...], chosen: Candidate) -> Placement:
    """Keep as many more experts as stored as fit beside a candidate and its slots, page-locked before pageable."""
    where, experts = chosen.placement, backend.experts
    if where.slots == experts.total:  # nothing is ever missed, so nothing needs to be kept twice
        return replace(where, pinned=0, pageable=0)
    for kept in (0, where.pageable):  # pageable ones may become page-locked, but none may be lost
        used = _used(backend, chosen.fixed, replace(where, pinned=0, pageable=kept))
        pinned = min(experts.total - kept, experts.held_in(room(bounds, used, Tier.PINNED)))
        used = _used(backend, chosen.fixed, replace(where, pinned=pinned, pageable=0))
        pageable = min(experts.total - pinned, experts.held_in(room(bounds, used, Tier.PAGEABLE)))
        if pinned + pageable >= where.pinned + where.pageable:
            break
    return replace(where, pinned=pinned, pageable=pageable)


def _used(backend: Backend, fixed: tuple[Reservation, ...], where: Placement) -> dict[Tier, int]:
    """Bytes by tier."""
    used = dict.fromkeys(Tier, 0)
    for line in fixed:
        used[line.tier] += line.bytes
    used[Tier.VRAM] += backend.slot_bytes(where.slots)
    used[Tier.PINNED] += backend.experts.held_bytes(where.pinned)
    used[Tier.PAGEABLE] += backend.experts.held_bytes(where.pageable)
    return used


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
