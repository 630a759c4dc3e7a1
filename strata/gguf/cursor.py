"""A position in a GGUF header that never reads past its end and turns every overrun into one clear error."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NoReturn

from strata.errors import ModelFileError

# No real header comes near this; it bounds what a hostile one can cost in time and memory.
MAX_HEADER_BYTES = 256 << 20
MAX_NAME_BYTES = 65_535  # of a key or a tensor name, as the GGUF specification has it for keys

DAMAGED = "The file is damaged or was not downloaded completely: compare its size with the source's and fetch it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Reads little-endian values one after the other.

    Parameters
    ----------
    buffer : bytes or mmap
        The file.
    asked : str
        What is being attempted, for error messages.
    """

    def __init__(self, buffer: bytes | mmap, asked: str) -> None:
        self.buffer = buffer
        self.asked = asked
        self.position = 0
        self.end = min(len(buffer), MAX_HEADER_BYTES)

    def fail(self, found: str, remedy: str = DAMAGED) -> NoReturn:
        """Refuse the file."""
        raise ModelFileError(self.asked, found, remedy)

    def require(self, nbytes: int, what: str) -> None:
        """Refuse the file unless `nbytes` more bytes follow."""
        if nbytes <= self.end - self.position:
            return
        if self.end == MAX_HEADER_BYTES:
            self.fail(f"{what} reaches past the {MAX_HEADER_BYTES >> 20} MiB that a header may take")
        self.fail(f"the file ends inside {what}: {nbytes} bytes needed at byte {self.position} of {self.end}")

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        self.require(4, what)
        (value,) = _U32.unpack_from(self.buffer, self.position)
        self.position += 4
        return int(value)

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        self.require(8, what)
        (value,) = _U64.unpack_from(self.buffer, self.position)
        self.position += 8
        return int(value)

    def take(self, nbytes: int, what: str) -> bytes:
        """Read `nbytes` bytes."""
        self.require(nbytes, what)
        start = self.position
        self.position += nbytes
        return self.buffer[start : self.position]

    def string(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Read a string: its length as 64-bit integer, then UTF-8."""
        length = self.u64(what)
        if length > max_bytes:
            self.fail(f"{what} claims to be {length} bytes long")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8 ({error.reason} at its byte {error.start})")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings without decoding them.

        A vocabulary and its merges are half a million strings, so this loop does nothing but hop from length to
        length. Each hop is at least 8 bytes, so it ends at the end of the file whatever the lengths say.
        """
        self.require(8 * count, what)
        read, buffer, position = _U64.unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + read(buffer, position)[0]
        except struct.error:
            position = self.end + 1
        if position > self.end:
            self.fail(f"the strings of {what} reach past the end of the file")
        self.position = position
