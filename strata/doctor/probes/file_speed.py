"""How fast a file reads: from its device, past the page cache, and again from the cache."""

from __future__ import annotations

import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

from strata.doctor.probes.collect import Collector, Unknown

BLOCK = 4 << 20
MOST_BLOCKS = 64
THREADS = 4  # one reader at a time leaves a solid-state disk half idle
MOST_SECONDS = 1.5  # a slow disk is measured with fewer blocks
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_FIELDS = ("read_bytes_per_s", "read_was_cached", "warm_read_bytes_per_s")


class OpenFile(Protocol):
    """A file that reads into page-aligned buffers, from any thread."""

    def read_into(self, buffer: mmap.mmap, offset: int) -> int:
        """Read at `offset` and return how many bytes came."""
        ...

    def is_cached(self, offset: int) -> bool:
        """Return whether the page at `offset` is in the page cache; raises `Unknown` where none can say."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class PosixFile:
    """A file read with preadv, past the page cache when `direct`."""

    def __init__(self, path: Path, direct: bool) -> None:
        self._file = os.open(path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0))
        if direct and sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._file, fcntl.F_NOCACHE, 1)

    def read_into(self, buffer: mmap.mmap, offset: int) -> int:
        """Read at `offset` and return how many bytes came."""
        return os.preadv(self._file, [buffer], offset)

    def is_cached(self, offset: int) -> bool:
        """Return whether the page at `offset` is in the page cache; raises `Unknown` where none can say."""
        if not hasattr(os, "RWF_NOWAIT"):
            raise Unknown("this system does not show what is in its cache")
        try:
            os.preadv(self._file, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as failure:
            raise Unknown(f"this file system does not show what is in its cache: {failure}") from None
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def sample(size: int) -> list[int]:
    """Return the offsets of up to `MOST_BLOCKS` whole blocks, spread over a file of `size` bytes."""
    whole = size // BLOCK
    count = min(whole, MOST_BLOCKS)
    return [number * whole // count * BLOCK for number in range(count)]


def read_blocks(file: OpenFile, offsets: list[int], threads: int) -> tuple[float, int]:
    """Read the blocks at `offsets`, several at a time; return bytes per second and how many were read in time."""
    deadline = time.perf_counter() + MOST_SECONDS

    def read_every(first: int) -> tuple[int, int]:
        buffer = mmap.mmap(-1, BLOCK)
        done = nbytes = 0
        for offset in offsets[first::threads]:
            nbytes += file.read_into(buffer, offset)
            done += 1
            if time.perf_counter() > deadline:
                break
        return done, nbytes

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        parts = list(pool.map(read_every, range(threads)))
        seconds = time.perf_counter() - started
    return sum(nbytes for _, nbytes in parts) / seconds, min(done for done, _ in parts) * threads


def collect_speed(found: Collector, path: Path, size: int) -> None:
    """Collect the read speeds of a file; `found` has its file system and whether its disk spins."""
    offsets = sample(size)
    if not offsets:
        reason = f"the file is smaller than the {BLOCK >> 20} MiB that are read to measure"
        found.unknown.update(dict.fromkeys(_FIELDS, reason))
        return
    threads = 1 if found.values.get("rotational") else THREADS  # a spinning disk only seeks more with several
    threads = min(threads, len(offsets))
    how = f"reads of {BLOCK >> 20} MiB, {threads} at a time"
    with closing(open_file(path, direct=False)) as buffered:
        try:
            with closing(open_file(path, direct=True)) as direct:
                speed, reached = read_blocks(direct, offsets, threads)
            found.values["read_was_cached"] = found.values.get("filesystem") in _MEMORY_FILESYSTEMS
            found.sources["read_bytes_per_s"] = f"unbuffered {how}"
        except OSError:  # some file systems (9p, FUSE) have no unbuffered reads
            found.take("read_was_cached", lambda: any(buffered.is_cached(offset) for offset in offsets))
            speed, reached = read_blocks(buffered, offsets, threads)
            found.sources["read_bytes_per_s"] = f"buffered {how}, because this file system has no unbuffered ones"
        found.values["read_bytes_per_s"] = speed
        read_blocks(buffered, offsets[:reached], threads)
        found.values["warm_read_bytes_per_s"], _ = read_blocks(buffered, offsets[:reached], threads)
        found.sources["warm_read_bytes_per_s"] = f"buffered {how}, for the second time"


def open_file(path: Path, direct: bool) -> OpenFile:
    """Open a file for measuring, past the page cache when `direct`."""
    if sys.platform == "win32":
        from strata.doctor.probes.windows_files import WindowsFile

        return WindowsFile(path, direct)
    return PosixFile(path, direct)
