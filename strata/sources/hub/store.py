"""Where files of one repository are kept, and the record of which of them Strata put there."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.errors import ModelUnavailable
from strata.folders import cache_folder
from strata.sources import Progress
from strata.sources.hub.choose import HubFile
from strata.sources.hub.name import is_plain

MODELS = "hf"  # folders in the cache
HEADERS = "hf-headers"
RECORD = "fetched.json"
LOCK = "fetching.lock"
PART = "part"
_PART = re.compile(rf"\.[0-9a-f]{{12}}\.{PART}$")


@dataclass(frozen=True)
class Store:
    """A folder with files of one repository.

    Only what its record names, with the size that it names, counts as kept: a file that somebody else put there is
    neither used nor deleted.
    """

    folder: Path

    def path(self, file: str) -> Path:
        """Where a file of the repository is kept, or would be."""
        return self.folder.joinpath(*file.split("/"))

    def part(self, file: HubFile) -> Path:
        """Where the file lies while it is not whole; another version of it has another name."""
        path = self.path(file.path)
        return path.with_name(f"{path.name}.{file.checksum[:12]}.{PART}")

    def files(self) -> list[HubFile]:
        """List what is kept."""
        return [file for file in self._recorded() if _size(self.path(file.path)) == file.nbytes]

    def _recorded(self) -> list[HubFile]:
        import msgspec

        try:
            record = msgspec.json.decode((self.folder / RECORD).read_bytes(), type=dict[str, HubFile])
        except FileNotFoundError:
            return []
        except (msgspec.MsgspecError, RecursionError):
            return []  # written in one step, so somebody changed it: then nothing is known to be ours
        return [file for file in record.values() if is_plain(file.path)]

    def require_free(self, file: HubFile) -> None:
        """Refuse to put a file where one lies that Strata did not put there.

        Raises
        ------
        ModelUnavailable
            One does.
        """
        path = self.path(file.path)
        if path.exists() and not any(recorded.path == file.path for recorded in self._recorded()):
            raise ModelUnavailable(
                f"fetch {file.path}",
                f"at its place lies a file that Strata did not fetch: {path}",
                "Give its path as MODEL, or move it away",
            )

    def keeps(self, file: str) -> bool:
        """Say whether the file is kept."""
        return any(kept.path == file for kept in self.files())

    def put(self, file: HubFile, part: Path) -> None:
        """Move a finished file into its place and record it; the caller holds `lock`."""
        part.replace(self.path(file.path))
        self._record([kept for kept in self.files() if kept.path != file.path] + [file])

    def remove(self, path: Path) -> None:
        """Delete a kept file, given by where it lies."""
        path.unlink(missing_ok=True)
        self._record([kept for kept in self.files() if self.path(kept.path) != path])

    def parts(self) -> list[Path]:
        """List the files that are not whole."""
        return sorted(path for path in self.folder.rglob(f"*.{PART}") if _PART.search(path.name) and path.is_file())

    def tidy(self) -> None:
        """Remove the record, the lock and the folders in which nothing is left."""
        if self.files() or self.parts():
            return
        for name in (RECORD, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        below = sorted((path for path in self.folder.rglob("*") if path.is_dir()), reverse=True)
        for folder in (*below, self.folder, self.folder.parent, self.folder.parents[1]):
            with contextlib.suppress(OSError):  # not empty: it holds what is not ours
                folder.rmdir()

    @contextlib.contextmanager
    def lock(self, waiting: str, progress: Progress) -> Iterator[None]:
        """Keep other processes from fetching into the same folder, and leave no empty one behind."""
        import filelock

        self.folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress(waiting, None, None)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
            self.tidy()

    @contextlib.contextmanager
    def lock_now(self) -> Iterator[None]:
        """Keep other processes from fetching into the folder.

        Raises
        ------
        OSError
            One is just doing so.
        """
        import filelock

        try:
            with filelock.FileLock(self.folder / LOCK, timeout=0):
                yield
        except filelock.Timeout:
            raise OSError(errno.EBUSY, "another Strata is just fetching it", str(self.folder)) from None
        self.tidy()

    def _record(self, files: list[HubFile]) -> None:
        import msgspec

        written = self.folder / f"{RECORD}.new"
        written.write_bytes(msgspec.json.format(msgspec.json.encode({file.path: file for file in files})))
        written.replace(self.folder / RECORD)


def store(kind: str, repo: str) -> Store:
    """Return the store of a repository ``owner/repo``: `kind` is `MODELS` or `HEADERS`."""
    return Store(cache_folder().joinpath(kind, *repo.split("/")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
