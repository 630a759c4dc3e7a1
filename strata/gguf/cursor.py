"""A position in a GGUF header that never reads past its end and turns every overrun into one clear error."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NoReturn

from strata.errors import ModelFileError
from strata.gguf.strings import LENGTH, skip_strings
from strata.gguf.wording import DAMAGED

# Real headers take up to about 12 MB. This bounds what a hostile one can cost in time and memory.
MAX_HEADER_BYTES = 64 << 20
MAX_NAME_BYTES = 65_535  # of a key or tensor; the GGUF specification's limit for keys

_U32 = struct.Struct("<I")


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
        return self._unpack(LENGTH, what)

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
        """Step over `count` strings without decoding them."""
        self.require(LENGTH.size * count, what)
        try:
            end = skip_strings(self.buffer, self.position, count)
        except (struct.error, OverflowError):  # a length led past the end; past 2^63 it is an OverflowError
            self._fail_short(what)
        self.require(end - self.position, what)
        self.position = end

    def _unpack(self, number: struct.Struct, what: str) -> int:
        self.require(number.size, what)
        value: int = number.unpack_from(self.buffer, self.position)[0]
        self.position += number.size
        return value

    def _fail_short(self, what: str) -> NoReturn:
        if len(self.buffer) == MAX_HEADER_BYTES:
            self.fail(f"{what} reaches past the {MAX_HEADER_BYTES >> 20} MiB that a header may take")
        self.fail(f"the file ends at byte {len(self.buffer)}, inside {what}")
