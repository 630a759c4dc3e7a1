"""Numbers as people read them: sizes, speeds and versions."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def size(nbytes: float) -> str:
    """Return `nbytes` in the largest binary unit that keeps it readable: ``322 MiB``, ``23.5 GiB``."""
    if abs(nbytes) >= 1000 * MIB:
        return f"{nbytes / GIB:,.1f} GiB"
    if abs(nbytes) >= MIB:
        return f"{nbytes / MIB:,.0f} MiB"
    return f"{nbytes:,.0f} B"


def speed(bytes_per_s: float) -> str:
    """Return a speed in decimal GB/s, the unit that buses and disks are sold by."""
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s < 10e9 else f"{bytes_per_s / 1e9:,.0f} GB/s"


def version(text: str | None) -> tuple[int, ...] | None:
    """Return the leading dotted number of `text` as integers (``"615.78.05"`` -> ``(615, 78, 5)``), or None."""
    match = re.match(r"\s*v?(\d{1,9}(?:\.\d{1,9}){0,5})", text or "")
    return tuple(int(part) for part in match[1].split(".")) if match else None
