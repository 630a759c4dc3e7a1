"""Windows' volumes and files, through calls of kernel32 as its documentation has them."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest

from strata.doctor.probes import dxgi, windows, windows_files
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.windows_files import WindowsFile, is_rotational, volume

INVALID = ctypes.c_void_p(-1).value
EVENT, FILE = 77, 66
DATA = bytes(range(256)) * 40


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="the layouts are those of 64 bits")
@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [
        (windows._MemoryStatusEx, 64, {"total": 8, "commit_limit": 24, "commit_available": 32}),
        (windows_files._Overlapped, 32, {"offset": 16, "offset_high": 20, "event": 24}),
        (windows_files._PropertyQuery, 12, {"property": 0, "query": 4}),
        (windows_files._SeekPenalty, 12, {"penalty": 8}),
        (dxgi._Desc1, 312, {"vendor": 256, "dedicated": 272, "shared": 288, "luid": 296, "flags": 304}),
        (dxgi._VideoMemory, 32, {"budget": 0, "used": 8}),
    ],
)
def test_structures_lie_as_windows_lays_them_out(structure: Any, size: int, offsets: dict[str, int]) -> None:
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


class Kernel32:
    """A disk with one file, as far as the calls that are used can see it."""

    def __init__(self, *, spins: int = 0, refuse: str = "") -> None:
        self.open: list[int] = []
        self.flags: list[int] = []
        self.spins, self.refuse, self.error = spins, refuse, 0

    def _ok(self, call: str, error: int = 5) -> int:
        if call != self.refuse:
            return 1
        self.error = error
        return 0

    def CreateFileW(self, name: Any, access: int, share: int, security: Any, how: int, flags: int, like: Any) -> Any:
        assert (share, security, how, like) == (7, None, 3, None)  # everyone may use it too; OPEN_EXISTING
        self.flags.append(flags)
        self.name = name.value
        if not self._ok("CreateFileW"):
            return INVALID
        self.open.append(FILE)
        return FILE

    def CreateEventW(self, *arguments: Any) -> int:
        assert arguments == (None, 1, 0, None)
        self.open.append(EVENT)
        return EVENT

    def CloseHandle(self, handle: Any) -> int:
        self.open.remove(handle.value)
        return 1

    def ReadFile(self, file: Any, target: Any, length: int, done: Any, overlapped: Any) -> int:
        assert (file.value, done) == (FILE, None)
        asked = overlapped._obj
        assert asked.event == EVENT
        offset = asked.offset | asked.offset_high << 32
        part = DATA[offset - (5 << 32) :][:length]
        self.read = len(part)
        ctypes.memmove(target, part, len(part))
        self.error = 997 if part else 38  # pending, or the end of the file
        return 0

    def GetOverlappedResult(self, file: Any, overlapped: Any, done: Any, wait: int) -> int:
        assert wait == 1
        done._obj.value = self.read
        return self._ok("GetOverlappedResult", 1117)

    def GetVolumePathNameW(self, path: Any, root: Any, length: int) -> int:
        assert length == len(root)
        root.value = "C:\\"
        return self._ok("GetVolumePathNameW")

    def GetVolumeInformationW(self, root: Any, *more: Any) -> int:
        assert root.value == "C:\\"
        *unused, name, length = more
        assert (unused, length) == ([None, 0, None, None, None], len(name))
        name.value = "NTFS"
        return self._ok("GetVolumeInformationW")

    def GetDriveTypeW(self, root: Any) -> int:
        return 3

    def DeviceIoControl(self, file: Any, code: int, given: Any, size: int, answer: Any, room: int, *more: Any) -> int:
        assert (code, size, room) == (0x2D1400, 12, 12)
        assert (given._obj.property, given._obj.query) == (7, 0)
        answer._obj.penalty = self.spins
        return self._ok("DeviceIoControl", 1)


@pytest.fixture
def kernel32(monkeypatch: pytest.MonkeyPatch) -> Kernel32:
    fake = Kernel32()
    monkeypatch.setattr(windows_files, "_kernel32", lambda: fake)
    monkeypatch.setattr(windows_files, "_last_error", lambda: fake.error)
    return fake


def test_a_file_is_read_beyond_4_gib_past_the_cache_and_every_handle_is_closed(kernel32: Kernel32) -> None:
    file = WindowsFile(Path("C:/m.gguf"), direct=True)
    assert kernel32.flags == [0x6000_0000]  # overlapped, no buffering
    buffer = mmap.mmap(-1, 4096)
    assert file.read_into(buffer, (5 << 32) + 8192) == len(DATA) - 8192
    assert buffer[: len(DATA) - 8192] == DATA[8192:]
    assert file.read_into(buffer, (5 << 32) + 99_999) == 0  # at its end
    with pytest.raises(Unknown, match="does not show what is in its cache"):
        file.is_cached(0)
    file.close()
    assert kernel32.open == []


def test_a_read_that_fails_names_windows_code(kernel32: Kernel32) -> None:
    kernel32.refuse = "GetOverlappedResult"
    file = WindowsFile(Path("C:/m.gguf"), direct=False)
    with pytest.raises(OSError, match="Windows error 1117"):
        file.read_into(mmap.mmap(-1, 4096), 5 << 32)
    file.close()
    assert kernel32.open == []


def test_a_file_that_cannot_be_opened(kernel32: Kernel32) -> None:
    kernel32.refuse = "CreateFileW"
    with pytest.raises(OSError, match="Windows error 5"):
        WindowsFile(Path("C:/m.gguf"), direct=False)


def test_the_volume_of_a_file(kernel32: Kernel32) -> None:
    assert volume(Path("C:/models/m.gguf")) == ("C:\\", "fixed drive", "NTFS")
    for call in ("GetVolumePathNameW", "GetVolumeInformationW"):
        kernel32.refuse = call
        with pytest.raises(OSError, match=call):
            volume(Path("C:/models/m.gguf"))


@pytest.mark.parametrize("spins", [0, 1])
def test_a_disk_says_whether_it_seeks(kernel32: Kernel32, spins: int) -> None:
    kernel32.spins = spins
    assert is_rotational(Path("C:/m.gguf")) is bool(spins)
    assert kernel32.name == "\\\\.\\C:"
    assert kernel32.open == []
    kernel32.refuse = "DeviceIoControl"
    with pytest.raises(Unknown, match="does not say: Windows error 1"):
        is_rotational(Path("C:/m.gguf"))
    assert kernel32.open == []
