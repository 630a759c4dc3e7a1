"""Numbers as people read them: sizes, speeds and versions."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4 * KIB  # RAM is handed out in pages


def size(nbytes: float) -> str:
    """Return `nbytes` in the binary unit that reads best, no zeros trailing: ``322 MiB``, ``23.5 GiB``, ``512 B``."""
    if abs(nbytes) >= 1000 * MIB:
        return f"{_short(nbytes / GIB, 2)} GiB"
    if abs(nbytes) >= MIB // 10:
        return f"{_short(nbytes / MIB, 1)} MiB"
    return f"{nbytes:,.0f} B"


def speed(bytes_per_s: float) -> str:
    """Return a speed in decimal GB/s, the unit that buses and disks are sold by."""
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s < 10e9 else f"{bytes_per_s / 1e9:,.0f} GB/s"


def version(text: str | None) -> tuple[int, ...] | None:
    """Return the leading dotted number of `text` as integers (``"615.78.05"`` -> ``(615, 78, 5)``), or None."""
    match = re.match(r"\s*v?(\d{1,9}(?:\.\d{1,9}){0,5})", text or "")
    return tuple(int(part) for part in match[1].split(".")) if match else None


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: ``1 check``, ``3 checks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `nbytes`."""
    return -(-nbytes // step) * step


def _short(number: float, decimals: int) -> str:
    return f"{number:,.{decimals}f}".rstrip("0").rstrip(".")
