"""Files that a person asked for: written whole or not at all, wherever the path leads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from strata.errors import StrataError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def write_files(files: Mapping[Path, bytes], asked: str, remedy: str) -> None:
    """Write files by way of temporary ones beside them, which are renamed when all are complete.

    A link is followed, a read-only file is left alone, and what is no regular file (/dev/stdout, a pipe) is written
    straight. A new file gets the mode that the person's umask gives any file: a plan holds sizes and a model's name,
    and facts and reports are redacted before they come here, since they are made to be passed on. A replaced file
    keeps its mode.

    Parameters
    ----------
    files : mapping of Path to bytes
    asked : str
        What is being done, for the message of an error.
    remedy : str
        What helps against a path that cannot be written.

    Raises
    ------
    UsageError
        A path cannot be written.
    StrataError
        The disk is full or broken.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, data in files.items():
            if _is_written_straight(path):
                path.write_bytes(data)
                continue
            target = Path(os.path.realpath(path))
            mode = _mode(target)
            temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}")
            staged[temporary] = target
            _write_new(temporary, data, mode)
        for temporary, target in staged.items():
            temporary.replace(target)
    except (OSError, ValueError) as error:  # ValueError: a path that no system can have
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise StrataError(asked, why, "Free some space there, or choose another folder") from None
        raise UsageError(asked, why, remedy) from None
    finally:
        for temporary in staged:
            with suppress(OSError):  # renamed, or never made
                temporary.unlink()


def _is_written_straight(path: Path) -> bool:
    """Say whether `path` is a device, a pipe, or a name for an open file: to be written, never replaced."""
    if path.parts[:2] in (("/", "dev"), ("/", "proc")) and path.parts[2:3] != ("shm",):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _mode(target: Path) -> int | None:
    """Return the mode of the file that is to be replaced, None when there is none.

    A rename would replace a folder's name or a read-only file without a question, so both are refused here.
    """
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder", str(target))
    if not target.exists():
        return None
    mode = stat.S_IMODE(target.stat().st_mode)
    if not mode & 0o222 or not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file that is there is read-only", str(target))
    return mode


def _write_new(path: Path, data: bytes, mode: int | None) -> None:
    with path.open("xb") as file:  # 0666 less the umask
        if mode is not None:
            path.chmod(mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # or a crash after the rename could leave an empty file
