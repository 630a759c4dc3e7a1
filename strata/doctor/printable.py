"""Keep what a terminal acts on out of what is printed: a name in a file of somebody else's must not steer a screen."""

from __future__ import annotations

# Control characters but for line feed and tab, and those that turn the direction of writing.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_DIRECTIONS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TABLE = dict.fromkeys(_CONTROLS + _DIRECTIONS)


def printable(text: str) -> str:
    """Return `text` without the signs that a terminal would obey instead of showing them; none of them has a width."""
    return text if text.isprintable() else text.translate(_TABLE)
