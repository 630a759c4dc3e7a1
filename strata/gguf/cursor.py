"""A position in a GGUF header that never reads past its end and turns every overrun into one clear error."""

from __future__ import annotations

import reprlib
import struct
from mmap import mmap
from typing import NoReturn

from strata.errors import ModelFileError

# Real headers take some megabytes. This bounds what a hostile one can cost in time and memory.
MAX_HEADER_BYTES = 128 << 20
MAX_NAME_BYTES = 65_535  # of a key or tensor; the GGUF specification's limit for keys

DAMAGED = "The file is damaged or was not downloaded completely: compare its size with the source's and fetch it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
shown = _short.repr  # a value from a file for an error message: escaped, and never long


class Cursor:
    """Reads little-endian values one after the other.

    Parameters
    ----------
    buffer : bytes, mmap or memoryview
        The file.
    asked : str
        What is being attempted, for error messages.
    """

    def __init__(self, buffer: bytes | mmap | memoryview, asked: str) -> None:
        self.buffer = memoryview(buffer)[:MAX_HEADER_BYTES]
        self.asked = asked
        self.position = 0

    def fail(self, found: str, remedy: str = DAMAGED) -> NoReturn:
        """Refuse the file."""
        raise ModelFileError(self.asked, found, remedy)

    def require(self, nbytes: int, what: str) -> None:
        """Refuse the file unless `nbytes` more bytes follow."""
        if nbytes > len(self.buffer) - self.position:
            self._fail_short(what)

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        return self._unpack(_U32, what)

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        return self._unpack(_U64, what)

    def take(self, nbytes: int, what: str) -> memoryview:
        """Read `nbytes` bytes, without a copy."""
        self.require(nbytes, what)
        start = self.position
        self.position += nbytes
        return self.buffer[start : self.position]

    def string(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Read a string: its length as a 64-bit integer, then UTF-8."""
        length = self.u64(what)
        if length > max_bytes:
            self.fail(f"{what} claims to be {length} bytes long")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8: {error.reason} at its byte {error.start}")

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings without decoding them.

        A vocabulary and its merges are half a million strings, so the loop only hops from length to length. A hop is
        8 bytes or more, so it ends with the buffer whatever count and lengths claim.
        """
        self.require(_U64.size * count, what)
        read, buffer, position = _U64.unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + read(buffer, position)[0]
        except (struct.error, OverflowError):  # a length led past the end; past 2^63 it is an OverflowError
            self._fail_short(what)
        self.require(position - self.position, what)
        self.position = position

    def _unpack(self, number: struct.Struct, what: str) -> int:
        self.require(number.size, what)
        value: int = number.unpack_from(self.buffer, self.position)[0]
        self.position += number.size
        return value

    def _fail_short(self, what: str) -> NoReturn:
        if len(self.buffer) == MAX_HEADER_BYTES:
            self.fail(f"{what} reaches past the {MAX_HEADER_BYTES >> 20} MiB that a header may take")
        self.fail(f"the file ends at byte {len(self.buffer)}, inside {what}")
