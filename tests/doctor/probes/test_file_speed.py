from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path

import pytest

from strata.doctor.facts import DiskFacts
from strata.doctor.probes import file_speed
from strata.doctor.probes.collect import Collector, Unknown
from strata.doctor.probes.file_speed import BLOCK, MOST_BLOCKS, PosixFile, collect_speed, read_blocks, sample


class FakeFile:
    """A file whose reads are counted, and take as long as the test's clock says."""

    def __init__(self, cached: bool | None = False, refuse: int | None = None) -> None:
        self.offsets: list[int] = []
        self.threads: set[int] = set()
        self.closed = False
        self._cached = cached
        self._refuse = refuse

    def read_into(self, buffer: mmap.mmap, offset: int) -> int:
        if self._refuse is not None:
            raise OSError(self._refuse, "Invalid argument")
        self.offsets.append(offset)
        self.threads.add(threading.get_ident())
        return len(buffer)

    def is_cached(self, offset: int) -> bool:
        if self._cached is None:
            raise Unknown("cannot say")
        return self._cached

    def close(self) -> None:
        self.closed = True


def collect(
    monkeypatch: pytest.MonkeyPatch, direct: FakeFile, buffered: FakeFile, blocks: int = 8, **values: object
) -> DiskFacts:
    files = {True: direct, False: buffered}
    monkeypatch.setattr(file_speed, "open_file", lambda path, direct: files[direct])
    found = Collector()
    found.values |= values
    collect_speed(found, Path("model"), blocks * BLOCK)
    assert buffered.closed
    return DiskFacts(**found.fields())


def test_sample_spreads_whole_blocks_over_the_file() -> None:
    assert sample(BLOCK - 1) == []
    assert sample(3 * BLOCK + 5) == [0, BLOCK, 2 * BLOCK]
    offsets = sample(1000 * BLOCK)
    assert len(offsets) == MOST_BLOCKS
    assert offsets == sorted(set(offsets))
    assert offsets[-1] >= 980 * BLOCK
    assert all(offset % BLOCK == 0 for offset in offsets)


def test_unbuffered_first_then_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, buffered = FakeFile(), FakeFile()
    facts = collect(monkeypatch, direct, buffered, filesystem="ext4", rotational=False)
    assert facts.read_was_cached is False
    assert facts.read_bytes_per_s is not None
    assert facts.warm_read_bytes_per_s is not None
    assert sorted(direct.offsets) == sample(8 * BLOCK)
    assert sorted(buffered.offsets) == sorted(sample(8 * BLOCK) * 2)
    assert direct.closed
    assert facts.sources["read_bytes_per_s"] == "unbuffered reads of 4 MiB, 4 at a time"


def test_spinning_disk_is_read_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = FakeFile()
    facts = collect(monkeypatch, direct, FakeFile(), rotational=True)
    assert direct.offsets == sample(8 * BLOCK)
    assert facts.sources["read_bytes_per_s"] == "unbuffered reads of 4 MiB, 1 at a time"


@pytest.mark.parametrize("cached", [True, False, None])
def test_file_system_without_unbuffered_reads(monkeypatch: pytest.MonkeyPatch, cached: bool | None) -> None:
    direct, buffered = FakeFile(refuse=errno.EINVAL), FakeFile(cached=cached)
    facts = collect(monkeypatch, direct, buffered, filesystem="9p")
    assert facts.read_was_cached is cached
    assert ("read_was_cached" in facts.unknown) == (cached is None)
    assert facts.read_bytes_per_s is not None
    assert facts.sources["read_bytes_per_s"].startswith("buffered")


def test_memory_file_system_is_always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect(monkeypatch, FakeFile(), FakeFile(), filesystem="tmpfs").read_was_cached is True


def test_small_file_is_unknown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Collector()
    collect_speed(found, Path("model"), BLOCK - 1)
    assert found.values == {}
    assert set(found.unknown) == {"read_bytes_per_s", "read_was_cached", "warm_read_bytes_per_s"}


def test_slow_disk_is_measured_with_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000))
    monkeypatch.setattr(file_speed.time, "perf_counter", lambda: float(next(clock)))
    file = FakeFile()
    speed, reached = read_blocks(file, sample(8 * BLOCK), 1)
    assert len(file.offsets) < 8
    assert reached == len(file.offsets)
    assert speed > 0


def test_posix_file_reads_the_same_bytes_either_way(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (2 * mmap.PAGESIZE // 256))
    buffer = mmap.mmap(-1, mmap.PAGESIZE)
    for direct in (False, True):
        file = PosixFile(path, direct)
        assert file.read_into(buffer, mmap.PAGESIZE) == mmap.PAGESIZE
        assert buffer[:256] == bytes(range(256))
        file.close()


def test_cached_after_a_buffered_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    file = PosixFile(path, direct=False)
    file.read_into(mmap.mmap(-1, mmap.PAGESIZE), 0)
    assert file.is_cached(0)
    file.close()
