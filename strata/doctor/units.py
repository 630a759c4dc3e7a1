"""Sizes as people read them: MiB and GiB, always powers of two."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size(nbytes: int) -> str:
    """Write a number of bytes as GiB, MiB or, below a tenth of a MiB, bytes."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:,.2f} GiB"
    if abs(nbytes) >= MIB // 10:
        return f"{nbytes / MIB:,.1f} MiB"
    return f"{nbytes:,} bytes"


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `nbytes`."""
    return -(-nbytes // step) * step
