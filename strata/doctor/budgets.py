"""What each memory offers, from facts: usable budgets and the reserves left free inside them.

Every function here is monotone: more of a fact never makes less of a budget, and a budget less its reserve never
shrinks when the budget grows. A fact that could not be read is never taken for 0: either the person gives a
budget and a note says that it was not verified, or the question is `Undetermined`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from strata.doctor.facts import Facts, HostFacts
from strata.doctor.plan import AllocationPlan, Budget, PlanOptions, SharedBudget, Tier
from strata.doctor.units import GIB, MIB, size
from strata.errors import Undetermined

TIER_NAMES = {
    Tier.VRAM: "VRAM",
    Tier.PINNED: "page-locked RAM",
    Tier.PAGEABLE: "pageable RAM",
    Tier.FILE: "the model file",
}
NO_LIMIT = "no limit"  # the reason a probe gives for a limit that does not exist


@dataclass(frozen=True, slots=True)
class Bound:
    """At most `free` bytes may be reserved in `tiers` together; `name` is the memory's, for people."""

    name: str
    tiers: tuple[Tier, ...]
    free: int

    def left(self, used: Mapping[Tier, int]) -> int:
        """Return the bytes that are left beside `used`, negative when the bound is broken."""
        return self.free - sum(map(used.__getitem__, self.tiers))  # asked thousands of times for one plan


@dataclass(frozen=True, slots=True)
class Limits:
    """What each tier offers, what several offer together, and what was assumed on the way, as sentences."""

    budgets: tuple[Budget, ...]
    shared: tuple[SharedBudget, ...]
    notes: tuple[str, ...] = ()
    names: Mapping[Tier, str] = field(default_factory=lambda: TIER_NAMES)

    def bounds(self) -> tuple[Bound, ...]:
        """Return every bound that a plan must keep, the memories that several tiers share first."""
        together = tuple(Bound(s.name, s.tiers, s.usable_bytes - s.reserve_bytes) for s in self.shared)
        alone = tuple(Bound(self.names[b.tier], (b.tier,), b.usable_bytes - b.reserve_bytes) for b in self.budgets)
        return together + alone


def tier_names(plan: AllocationPlan) -> Mapping[Tier, str]:
    """Return what people call the tiers of a plan."""
    return cpu_tier_names(plan.options) if plan.device.backend == "numpy" else TIER_NAMES


def cpu_tier_names(options: PlanOptions) -> Mapping[Tier, str]:
    """Return what people call the tiers on a CPU: all are RAM, some of it bounded by an option of its own."""
    names = TIER_NAMES | {Tier.VRAM: "RAM", Tier.PAGEABLE: "RAM"}
    if options.vram_budget_bytes is not None:
        names[Tier.VRAM] = "RAM within --vram-budget"
    if options.pinned_budget_bytes is not None:
        names[Tier.PINNED] = "RAM within --pinned-budget"
    return names


def room(bounds: Iterable[Bound], used: Mapping[Tier, int], tier: Tier) -> int:
    """Return the bytes that `tier` can still take under every bound, negative where one is broken."""
    return min(bound.left(used) for bound in bounds if tier in bound.tiers)


@dataclass(frozen=True, slots=True)
class UsableRam:
    """The RAM that this process may take, and how that came about."""

    usable_bytes: int
    reserve_bytes: int
    formula: str
    source: str
    notes: tuple[str, ...]


def system_reserve(usable: int) -> int:
    """Return the RAM left to the system: a sixteenth, at least 256 MiB and at most 2 GiB.

    It covers what grows while a model runs and belongs to no line: page tables, other programs, and the page cache
    that reading the model file wants. A sixteenth keeps it small in a container; 2 GiB is what a desktop
    needs to stay responsive.
    """
    return min(max(usable // 16, 256 * MIB), 2 * GIB, usable)


def usable_ram(facts: Facts, options: PlanOptions) -> UsableRam:
    """Work out the RAM this process may take: what the system has available, or the container, whichever is less.

    The kernel ends a process that crosses its control group's limit however much RAM the host has, so
    ``limit - used + reclaimable`` counts as much as MemAvailable. What ``--ram-budget`` or a limit on the address space
    (``ulimit -v``) holds back joins the reserve.

    Raises
    ------
    Undetermined
        The available RAM is unknown and no ``--ram-budget`` was given.
    """
    host = facts.host.value or HostFacts()
    notes: list[str] = []
    why_no_limit = host.unknown.get("cgroup_limit_bytes", NO_LIMIT)
    if host.cgroup_limit_bytes is None and why_no_limit != NO_LIMIT:
        notes.append(f"Whether a container limits memory could not be read ({why_no_limit}).")
    terms: list[tuple[int, str, str]] = []
    if host.ram_available_bytes is not None:
        terms.append((host.ram_available_bytes, f"{size(host.ram_available_bytes)} available", "available RAM"))
    if host.cgroup_limit_bytes is not None and host.cgroup_used_bytes is not None:
        reclaimable = host.cgroup_reclaimable_bytes or 0  # unknown: what cannot be shown reclaimable is in use
        left = max(host.cgroup_limit_bytes - host.cgroup_used_bytes + reclaimable, 0)
        text = (
            f"{size(host.cgroup_limit_bytes)} container limit - {size(host.cgroup_used_bytes)} used"
            f" + {size(reclaimable)} reclaimable"
        )
        terms.append((left, text, "the container's memory limit"))
    unknown = _unknown_ram(facts, host)
    asked = options.ram_budget_bytes
    if unknown and asked is None:
        raise Undetermined("find out how much RAM may be used", unknown, "Give --ram-budget, such as --ram-budget 8GiB")
    if unknown or not terms:
        assert asked is not None
        notes.append(f"The RAM budget of {size(asked)} is as given and not verified: {unknown}.")
        return UsableRam(asked, 0, f"{size(asked)} as given", "--ram-budget", tuple(notes))
    usable = min(bytes_ for bytes_, _, _ in terms)
    reserve = system_reserve(usable)
    formula = terms[0][1] if len(terms) == 1 else f"min({', '.join(text for _, text, _ in terms)})"
    formula += f", {size(reserve)} left to the system"
    if asked is not None:
        reserve = max(reserve, usable - asked)
        formula += f", at most {size(asked)} for this process (--ram-budget)"
    mappable = address_space_left(host)
    if mappable is not None and mappable < usable - reserve:
        reserve = usable - mappable
        formula += f", at most {size(mappable)} for this process (ulimit -v)"
        in_use = host.address_space_used_bytes
        notes.append(
            f"The address space of this process is limited to {size(host.address_space_limit_bytes or 0)} (ulimit -v), "
            + (f"of which {size(in_use)} are in use." if in_use is not None else "and what is in use of it is unknown.")
        )
    return UsableRam(usable, reserve, formula, " and ".join(source for _, _, source in terms), tuple(notes))


def address_space_left(host: HostFacts) -> int | None:
    """Return how much this process may still map; None where nothing limits it.

    What is mapped takes RAM only once it is touched, so this bounds what the process takes, and the system needs no
    reserve of it. While its use is unknown all of the limit counts: what is too much will be refused when it is taken,
    before anything is read.
    """
    if host.address_space_limit_bytes is None:
        return None
    return max(host.address_space_limit_bytes - (host.address_space_used_bytes or 0), 0)


def _unknown_ram(facts: Facts, host: HostFacts) -> str | None:
    """Say what keeps the usable RAM from being known, if anything does."""
    if host.ram_available_bytes is None:
        why = host.unknown.get("ram_available_bytes") or (facts.host.error and facts.host.error.message)
        return f"the available RAM could not be read ({why or 'no reason was recorded'})"
    if host.cgroup_limit_bytes is not None and host.cgroup_used_bytes is None:
        why = host.unknown.get("cgroup_used_bytes", "no reason was recorded")
        return f"memory is limited to {size(host.cgroup_limit_bytes)} here, but its use could not be read ({why})"
    return None


def numpy_limits(facts: Facts, options: PlanOptions) -> Limits:
    """Share the RAM among the tiers of the numpy backend.

    There is one memory, so there is one bound, and the planner divides it as serves the model best: fixed lines
    first, then ready expert slots against experts kept as stored. ``--vram-budget`` and ``--pinned-budget`` cap the
    shares that play the device's memory and page-locked memory. Page-locked memory gains nothing on a CPU, so without
    ``--pinned-budget`` its share is 0.
    """
    ram = usable_ram(facts, options)
    budgets = []
    for tier, cap, option in (
        (Tier.VRAM, options.vram_budget_bytes, "--vram-budget"),
        (Tier.PINNED, options.pinned_budget_bytes or 0, "--pinned-budget"),
        (Tier.PAGEABLE, None, ""),
    ):
        share = ram.usable_bytes if cap is None else min(ram.usable_bytes, cap)
        budgets.append(
            Budget(
                tier=tier,
                device="cpu" if tier is Tier.VRAM else "host",
                usable_bytes=share,
                reserve_bytes=0,
                formula=f"a share of RAM, at most {size(cap)}" if cap is not None else "a share of RAM",
                source=option if cap else "RAM",
            )
        )
    shared = SharedBudget(
        name="RAM",
        tiers=(Tier.VRAM, Tier.PINNED, Tier.PAGEABLE),
        usable_bytes=ram.usable_bytes,
        reserve_bytes=ram.reserve_bytes,
        formula=ram.formula,
        source=ram.source,
    )
    return Limits(tuple(budgets), (shared,), ram.notes, cpu_tier_names(options))
