"""Fetching one file so that nothing that arrived is lost and nothing wrong is kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from strata.errors import ModelUnavailable
from strata.folders import VARIABLE
from strata.sources.hub.api import Interrupted, read
from strata.sources.hub.choose import HubFile, shown_size
from strata.sources.hub.name import HubName
from strata.sources.hub.store import Store

# Servers in front of a hub send at most 50 GB in one answer; and a lost answer then costs little.
_SEGMENT = 8 << 30
_PAUSES_S = (1, 2, 4, 8, 16)  # between tries in a row that bring nothing
_HASHED = 4 << 20


def require_space(name: HubName, store: Store, files: Sequence[HubFile]) -> None:
    """Refuse to begin what the disk cannot take.

    Raises
    ------
    ModelUnavailable
        Fewer bytes are free than are still to come.
    """
    here = sum(path.stat().st_size for file in files if (path := store.part(file)).is_file())
    missing = sum(file.nbytes for file in files) - here
    place = next(folder for folder in (store.folder, *store.folder.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing > free:
        raise ModelUnavailable(
            f"fetch {name}",
            f"{shown_size(missing)} are to come, but only {shown_size(free)} are free on the disk of {store.folder}",
            f"Free some space (`strata cache list` shows what Strata keeps), or set {VARIABLE} to a larger disk",
        )


def download(name: HubName, commit: str, file: HubFile, store: Store, progress: Callable[[int], None]) -> None:
    """Fetch a file into `store`, going on where an earlier try ended.

    Parameters
    ----------
    progress : callable
        Told the bytes that are there, as they come.

    Raises
    ------
    ModelUnavailable
        It breaks off again and again (what came is kept), the hub lists no checksum, the bytes have another,
        or a file that Strata did not fetch lies at its place.
    """
    if not file.checksum:
        raise ModelUnavailable(
            f"fetch {file.path} of {name}",
            "the hub lists no checksum of it",
            "Fetch it by other means and give its path, or name another hub in HF_ENDPOINT",
        )
    store.require_free(file)
    part = store.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    digest = _digest(file)
    done = _hash(part, digest, progress)
    if done > file.nbytes:
        part.unlink()
        done, digest = 0, _digest(file)
    try:
        with part.open("ab") as out:
            failures = 0
            while done < file.nbytes:
                before = done
                broken = "the answer is empty"
                try:
                    for chunk in read(name, commit, file, done, min(done + _SEGMENT, file.nbytes)):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress(done)
                except Interrupted as error:
                    broken = str(error)
                failures = 0 if done > before else failures + 1
                if failures > len(_PAUSES_S):
                    raise _broken_off(name, file, done, broken)
                if failures:
                    time.sleep(_PAUSES_S[failures - 1])
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise ModelUnavailable(
            f"fetch {file.path} of {name}",
            f"{error.strerror or error} ({part})",
            "Make room or access there; the same command goes on where this ended",
        ) from None
    if digest.hexdigest() != file.checksum:
        part.unlink()
        raise ModelUnavailable(
            f"fetch {file.path} of {name}",
            f"its checksum is {digest.hexdigest()}, the hub's {file.checksum}; what came was deleted",
            "Fetch it again; if this comes back, something on the way (proxy, disk, memory) changes bytes",
        )
    store.put(file, part)


def _digest(file: HubFile) -> hashlib._Hash:
    """Begin the checksum that the hub lists: SHA-256, or of a file that Git itself keeps that of a Git blob."""
    if len(file.checksum) == 40:
        return hashlib.sha1(f"blob {file.nbytes}\0".encode(), usedforsecurity=False)
    return hashlib.sha256()


def _hash(part: Path, digest: hashlib._Hash, progress: Callable[[int], None]) -> int:
    """Take what an earlier try left into the checksum; return its bytes."""
    if not part.is_file():
        return 0
    done = 0
    with part.open("rb") as file:
        while block := file.read(_HASHED):
            digest.update(block)
            done += len(block)
            progress(done)
    return done


def _broken_off(name: HubName, file: HubFile, done: int, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"fetch {file.path} of {name}",
        f"it broke off at {shown_size(done)} of {shown_size(file.nbytes)}, {len(_PAUSES_S) + 1} times in a row ({why})",
        "Check the network; the same command goes on where this ended",
    )
