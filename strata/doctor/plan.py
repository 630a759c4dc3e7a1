"""The allocation plan: an ordered list of reservations that the runtime must follow, as frozen data.

A plan is complete: every byte the process takes in a memory has a line, and the runtime allocates through a
line's id or not at all. This module holds the data and its JSON form; `planner` makes plans.

On the CPU the same plan is used: the tier ``vram`` is then a share of RAM that plays the device's memory.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SCHEMA_VERSION = 1
HOST = "host"  # the `device` of every host tier
CPU = "cpu"  # the `device` of the vram tier when the numpy backend runs


class Tier(StrEnum):
    """A memory that reservations live in, fastest first."""

    VRAM = "vram"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    FILE = "file"  # left in the model file: costs no budget


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the person asked for. ``None`` means auto. Bytes where a name ends in ``_bytes``."""

    device: str = "auto"  # "auto", "cpu", "cuda"; "simulated" where the facts are those of `--simulate`
    gpu: str | None = None  # index or UUID
    max_context: int | None = None
    kv: str | None = None  # "f16", "f32" or "int8"; None is the backend's default
    vram_budget_bytes: int | None = None  # everything the process takes on the device, context and reserve included
    ram_budget_bytes: int | None = None  # everything the process takes in host RAM
    pinned_budget_bytes: int | None = None
    vram_reserve_bytes: int | None = None
    expert_cache: int | None = None  # slots
    prefill: int | None = None  # tokens of the largest prompt chunk
    shrink: float | None = None  # of a simulated machine: what its memories are divided by


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which model a plan is for; a saved plan is refused for any other header."""

    name: str
    architecture: str
    header_sha256: str
    file_bytes: int


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which device a plan is for."""

    backend: str  # "numpy", "cuda" or "simulated"
    id: str  # GPU UUID, or "cpu"
    name: str


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier offers. ``reserved + reserve_bytes <= usable_bytes`` holds in every feasible plan."""

    tier: Tier
    device: str
    usable_bytes: int
    reserve_bytes: int  # deliberately left free inside `usable_bytes`
    formula: str  # how usable came about, with its numbers
    source: str  # which facts it rests on


class SharedBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A memory that several tiers draw on, such as RAM: it bounds the sum of their reservations, reserve included."""

    name: str  # for people: "RAM"
    tiers: tuple[Tier, ...]
    usable_bytes: int
    reserve_bytes: int
    formula: str
    source: str


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the plan."""

    id: str  # stable, e.g. "head", "kv_cache", "expert_slots"
    what: str  # for people
    tier: Tier
    device: str
    bytes: int  # allocation granularity included
    formula: str  # with its numbers
    fallback: str | None = None  # what was given up to get here, said aloud


class SlotClass(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of slots of one size, and the layers whose experts they hold."""

    line: str  # id of the reservation
    layers: tuple[int, ...]
    slots: int
    slot_bytes: int


class ExpertCachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the experts are kept. All zero for a dense model."""

    total: int  # experts in the model (layers x experts)
    slots: int  # ready slots in the vram tier, of all sizes
    slot_bytes: int  # of the largest
    minimum_slots: int  # fewest that work, in waves
    pinned: int = 0  # experts whose stored form lies in page-locked memory
    pageable: int = 0
    file: int = 0  # experts read from the file when missed
    classes: tuple[SlotClass, ...] = ()


class ExpectedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan's placement allows: bytes per token over bandwidths, as a range no wider than a factor 2."""

    decode_tokens_per_s: tuple[float, float]
    prefill_tokens_per_s: tuple[float, float]
    hit_rate: float  # share of expert requests that find a ready slot while decoding
    bytes_per_token: dict[Tier, int]  # read from each tier by one decoded token at that hit rate
    basis: tuple[str, ...]  # sentences: which bandwidths, measured or assumed, and where the hit rate comes from


class Shortfall(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no plan: the first line that does not fit."""

    line: str
    tier: Tier
    device: str
    missing_bytes: int  # by which everything that must lie in this memory exceeds it, not this line alone
    sentence: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A smallest change that makes an infeasible plan feasible, verified by planning again."""

    option: str  # as typed, e.g. "--max-context 2048"; empty when only another machine would do
    sentence: str


class AllocationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole promise. See the module's text."""

    schema_version: int = SCHEMA_VERSION
    strata_version: str
    model: ModelIdentity
    device: DeviceRef
    options: PlanOptions
    feasible: bool
    context: int  # tokens
    chunk: int  # tokens of the largest prompt chunk
    kv: str
    threads: int = 1  # that compute on the host; the workspaces are sized for no more
    experts: ExpertCachePlan
    budgets: tuple[Budget, ...]
    shared: tuple[SharedBudget, ...] = ()
    reservations: tuple[Reservation, ...]
    fallbacks: tuple[str, ...] = ()  # sentences: what was given up and why
    notes: tuple[str, ...] = ()  # sentences: assumptions and facts that were unknown
    shortfall: Shortfall | None = None
    changes: tuple[Change, ...] = ()
    expected: ExpectedSpeed | None = None  # None for an infeasible plan, and on a simulated machine

    def line(self, id: str) -> Reservation | None:
        """Return the reservation called `id`, or None when the plan has no such line."""
        return next((r for r in self.reservations if r.id == id), None)

    def planned_bytes(self, tier: Tier, device: str | None = None) -> int:
        """Return the bytes reserved in `tier` (on `device`, or on every device), reserve not included."""
        return sum(r.bytes for r in self.reservations if r.tier is tier and device in (None, r.device))
