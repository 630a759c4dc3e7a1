"""How much memory this process really holds, as the operating system counts it, beside what was planned.

The allocator's own sum is what was asked for; this is what was given. Pages of the mapped model file are left
out: they are the page cache's, come back for the asking and are no part of a plan's budget.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from strata.doctor.plan import Tier

_STATUS = Path("/proc/self/status")
_STEP = 1 << 20  # bytes
_ANONYMOUS_FIELDS = ("RssAnon:", "RssShmem:")


def anonymous_bytes() -> int:
    """Return the bytes of RAM this process holds for itself, file-backed pages left out.

    On Linux ``RssAnon + RssShmem`` of /proc/self/status (a pinned or shared mapping is charged to shmem);
    elsewhere psutil's unique set size, the memory that would be freed if the process ended now.
    """
    try:
        status = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return int(psutil.Process().memory_full_info().uss)
    kib = [int(line.split()[1]) for line in status.splitlines() if line.startswith(_ANONYMOUS_FIELDS)]
    if not kib:  # kernels before 4.5 do not tell anonymous pages apart
        return int(psutil.Process().memory_full_info().uss)
    return sum(kib) * 1024


def map_private(nbytes: int) -> mmap.mmap:
    """Map anonymous RAM of this process alone; nothing is taken until it is touched.

    In huge pages where the system has them: they are touched and page-locked in a fraction of the time.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the default, shared, is shmem
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def mappable_bytes(most: int) -> int:
    """Return how much more RAM the system would grant this process, `most` at most, to 1 MiB.

    Found by halving, with mappings that are never touched and so take no RAM: what limits the address space
    (``ulimit -v``) or all that may be promised (strict overcommit) refuses them, a container's limit does not.
    """
    granted, refused = 0, most + 1
    while refused - granted > _STEP:
        middle = (granted + refused) // 2
        try:
            map_private(middle).close()
            granted = middle
        except (OSError, MemoryError):
            refused = middle
    return granted


class TierMemory(msgspec.Struct, frozen=True):
    """One memory, planned and taken."""

    tier: Tier
    planned_bytes: int
    allocated_bytes: int  # the allocator's own sum


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Planned and actual, side by side.

    `actual_bytes` is what the whole process holds (`anonymous_bytes`), interpreter and libraries included, for which
    the plan has its "context" line: so it also holds what no allocator of ours knows of. `difference_bytes` is
    planned minus the peak, and never negative in a run that kept its promise. The device's two figures are the
    driver's own, and None where no device was used (numpy) or the driver did not say.
    """

    tiers: tuple[TierMemory, ...]
    planned_bytes: int
    allocated_bytes: int
    actual_bytes: int
    peak_bytes: int  # the highest `actual_bytes` that was seen
    vram_taken_bytes: int | None = None  # free VRAM before this process's context, minus free VRAM now
    vram_free_bytes: int | None = None  # free VRAM now, of all that the card has

    @property
    def difference_bytes(self) -> int:
        """Planned minus peak."""
        return self.planned_bytes - self.peak_bytes
