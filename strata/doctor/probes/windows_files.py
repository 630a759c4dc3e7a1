"""Windows' volumes and disks, and files read past its cache."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from strata.doctor.probes.collect import Unknown

_GENERIC_READ = 0x8000_0000
_SHARE_ALL = 7
_OPEN_EXISTING = 3
_OVERLAPPED = 0x4000_0000
_NO_BUFFERING = 0x2000_0000
_ERROR_IO_PENDING = 997
_ERROR_HANDLE_EOF = 38
_QUERY_PROPERTY = 0x2D1400  # IOCTL_STORAGE_QUERY_PROPERTY
_SEEK_PENALTY = 7  # StorageDeviceSeekPenaltyProperty
_DRIVE_KINDS = {2: "removable drive", 3: "fixed drive", 4: "network drive", 5: "CD-ROM", 6: "RAM disk"}
_PATH_LENGTH = 32768


class _Overlapped(ctypes.Structure):
    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


class _PropertyQuery(ctypes.Structure):
    _fields_ = (("property", ctypes.c_uint32), ("query", ctypes.c_uint32), ("more", ctypes.c_uint8))


class _SeekPenalty(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("size", ctypes.c_uint32), ("penalty", ctypes.c_uint8))


def _kernel32() -> Any:
    library = ctypes.CDLL("kernel32", use_last_error=True)
    for function in (library.CreateFileW, library.CreateEventW):
        function.restype = ctypes.c_void_p
    return library


def _last_error() -> int:
    return int(ctypes.get_last_error())  # type: ignore[attr-defined]


def _open(kernel32: Any, name: str, access: int, flags: int) -> ctypes.c_void_p:
    handle = kernel32.CreateFileW(ctypes.c_wchar_p(name), access, _SHARE_ALL, None, _OPEN_EXISTING, flags, None)
    if handle == ctypes.c_void_p(-1).value:
        raise OSError(f"cannot open {name}: Windows error {_last_error()}")
    return ctypes.c_void_p(handle)


class WindowsFile:
    """A file read at any offset from several threads at once, past the cache when `direct`."""

    def __init__(self, path: Path, direct: bool) -> None:
        self._kernel32 = _kernel32()
        flags = _OVERLAPPED | (_NO_BUFFERING if direct else 0)
        self._handle = _open(self._kernel32, str(path), _GENERIC_READ, flags)

    def read_into(self, buffer: mmap.mmap, offset: int) -> int:
        """Read at `offset` and return how many bytes came."""
        event = ctypes.c_void_p(self._kernel32.CreateEventW(None, 1, 0, None))
        overlapped = _Overlapped(offset=offset & 0xFFFF_FFFF, offset_high=offset >> 32, event=event.value)
        target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        done = ctypes.c_uint32()
        pending = ctypes.byref(overlapped)
        try:
            started = self._kernel32.ReadFile(self._handle, target, len(buffer), None, pending)
            if not started and _last_error() != _ERROR_IO_PENDING:
                return self._end_of_file()
            if not self._kernel32.GetOverlappedResult(self._handle, pending, ctypes.byref(done), 1):
                return self._end_of_file()
        finally:
            self._kernel32.CloseHandle(event)
        return done.value

    def _end_of_file(self) -> int:
        error = _last_error()
        if error != _ERROR_HANDLE_EOF:
            raise OSError(f"ReadFile: Windows error {error}")
        return 0

    def is_cached(self, offset: int) -> bool:
        """Raise `Unknown`: Windows does not show what is in its cache."""
        raise Unknown("Windows does not show what is in its cache")

    def close(self) -> None:
        """Close the file."""
        self._kernel32.CloseHandle(self._handle)


def volume(path: Path) -> tuple[str, str, str]:
    """Return the root, the kind of drive and the file system of the volume that holds `path`."""
    kernel32 = _kernel32()
    root = _volume_root(kernel32, path)
    filesystem = ctypes.create_unicode_buffer(64)
    unused = (None, 0, None, None, None)
    if not kernel32.GetVolumeInformationW(ctypes.c_wchar_p(root), *unused, filesystem, len(filesystem)):
        raise OSError(f"GetVolumeInformationW({root}): Windows error {_last_error()}")
    kind = kernel32.GetDriveTypeW(ctypes.c_wchar_p(root))
    return root, _DRIVE_KINDS.get(kind, "drive of unknown kind"), filesystem.value


def _volume_root(kernel32: Any, path: Path) -> str:
    root = ctypes.create_unicode_buffer(_PATH_LENGTH)
    if not kernel32.GetVolumePathNameW(ctypes.c_wchar_p(str(path)), root, len(root)):
        raise OSError(f"GetVolumePathNameW: Windows error {_last_error()}")
    return root.value


def is_rotational(path: Path) -> bool:
    """Return whether the disk that holds `path` has to seek."""
    kernel32 = _kernel32()
    root = _volume_root(kernel32, path)
    device = _open(kernel32, "\\\\.\\" + root.rstrip("\\"), 0, 0)
    query = _PropertyQuery(property=_SEEK_PENALTY)
    answer = _SeekPenalty()
    length = ctypes.c_uint32()
    try:
        answered = kernel32.DeviceIoControl(
            device,
            _QUERY_PROPERTY,
            ctypes.byref(query),
            ctypes.sizeof(query),
            ctypes.byref(answer),
            ctypes.sizeof(answer),
            ctypes.byref(length),
            None,
        )
        if not answered:
            raise Unknown(f"the disk does not say: Windows error {_last_error()}")
    finally:
        kernel32.CloseHandle(device)
    return bool(answer.penalty)
