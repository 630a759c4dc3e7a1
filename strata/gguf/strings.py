"""Arrays of strings: stepping over one at memory speed, and decoding it when it is asked for.

Each string is its length as a 64-bit integer, then its bytes. A vocabulary with its merges is half a million of them,
and a Python loop that hops from length to length spends most of the time of opening a file on them.
"""

from __future__ import annotations

import struct

import numpy as np

LENGTH = struct.Struct("<Q")

# Windows whose temporary arrays are reused by the allocator instead of being mapped anew: four times as fast.
_WINDOW_BYTES = 1 << 15
# When a window gives fewer strings than the first number, so many of the second are taken one by one, so that a file
# made to break every run costs little more than the plain loop.
_POOR_WINDOW, _PLAIN_HOPS = 128, 1024


def skip_strings(buffer: memoryview, position: int, count: int) -> int:
    """Find where an array of strings ends.

    Parameters
    ----------
    buffer : memoryview
        The file, or its first part.
    position : int
        Of the first string's length.
    count : int
        Number of strings.

    Returns
    -------
    int
        Position behind the last string; it may lie behind the end of the buffer.

    Raises
    ------
    struct.error, OverflowError
        When a length lies behind the end of the buffer.
    """
    while count:
        hops, position = _skip_short_strings(buffer, position, count)
        count -= hops
        if hops < _POOR_WINDOW:
            plain = min(count, _PLAIN_HOPS)
            for _ in range(plain):
                position += LENGTH.size + LENGTH.unpack_from(buffer, position)[0]
            count -= plain
    return position


def _skip_short_strings(buffer: memoryview, position: int, count: int) -> tuple[int, int]:
    """Step over up to `count` strings of 1 to 255 bytes, all those of a window at once.

    The length of such a string is a byte followed by seven zeros. Every place that looks like that is a candidate, and
    a run of candidates is the truth as long as each one's length leads exactly to the next.

    Returns
    -------
    tuple of int, int
        Strings stepped over, 0 when the first is not of this kind, and the position behind them.
    """
    window = np.frombuffer(buffer[position : position + _WINDOW_BYTES], np.uint8)
    if len(window) < 2 * LENGTH.size:
        return 0, position
    zero = window == 0
    two = zero[1:-1] & zero[2:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]  # whether the seven bytes behind each are zero
    heads = np.flatnonzero(seven & ~zero[: len(seven)])
    if not len(heads) or heads[0] != 0:
        return 0, position
    leads_on = heads[:-1] + LENGTH.size + window[heads[:-1]] == heads[1:]
    hops = len(leads_on) if leads_on.all() else int(leads_on.argmin())
    hops = min(hops, count)
    return hops, position + int(heads[hops])


def decode_strings(raw: bytes, count: int) -> list[str]:
    """Decode an array that `skip_strings` has stepped over.

    Raises
    ------
    ValueError
        When a string is not valid UTF-8; the message says which.
    """
    texts: list[str] = []
    position = 0
    try:
        for _ in range(count):
            start = position + LENGTH.size
            position = start + LENGTH.unpack_from(raw, position)[0]
            texts.append(raw[start:position].decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"element {len(texts)} is not valid UTF-8: {error.reason} at its byte {error.start}") from None
    return texts
