"""What lies in the cache that Strata put there, and deleting it. What Strata did not put there is never touched."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strata.folders import cache_folder
from strata.sources.demo import MODEL
from strata.sources.hub.name import HubName, shard_names
from strata.sources.hub.store import HEADERS, MODELS, Store

_LEFT_BEHIND_S = 24 * 3600  # an unfinished demo model that old belongs to no running process


class Kind(StrEnum):
    """What kept files are for."""

    MODEL = "model"
    HEADER = "header"  # the first megabytes of a model, to plan by
    UNFINISHED = "unfinished"  # a fetch that the same command would continue
    KERNELS = "kernels"  # compiled for a GPU, compiled again when missing
    PROFILES = "profiles"  # how often experts were asked for, counted again when missing


@dataclass(frozen=True)
class Kept:
    """One thing in the cache.

    Attributes
    ----------
    name : str
        What to type as MODEL; of compiled kernels, ``kernels``, of what is known of experts, ``profiles``.
    kind : Kind
    nbytes : int
        Of all its files.
    paths : tuple of Path
        Its files, or the folder of an unfinished demo model.
    """

    name: str
    kind: Kind
    nbytes: int
    paths: tuple[Path, ...]


def kept() -> list[Kept]:
    """List what Strata keeps in the cache, by name."""
    root = cache_folder()
    found = [*_demo(root), *_kernels(root / "kernels"), *_profiles(root / "profiles")]
    for folder, kind in ((MODELS, Kind.MODEL), (HEADERS, Kind.HEADER)):
        for repo in sorted(path for path in root.glob(f"{folder}/*/*") if path.is_dir()):
            found += _of_repository(Store(repo), kind)
    return sorted(found, key=lambda each: (each.name, each.kind))


def named(things: Sequence[Kept], name: str) -> list[Kept]:
    """Choose what `name` covers: the thing of that name, or all of a repository or folder that it names."""
    return [each for each in things if each.name == name or each.name.startswith(name.rstrip("/") + "/")]


def delete(thing: Kept) -> None:
    """Delete one kept thing.

    Raises
    ------
    OSError
        The system refuses, as Windows does while the file is in use, or it is just being fetched.
    """
    repository = _repository(thing)
    with repository.lock_now() if repository else contextlib.nullcontext():
        for path in thing.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif repository is not None and thing.kind is not Kind.UNFINISHED:
                repository.remove(path)
            else:
                path.unlink(missing_ok=True)


def _repository(thing: Kept) -> Store | None:
    root = cache_folder()
    for folder in (MODELS, HEADERS):
        if thing.paths[0].is_relative_to(root / folder):
            owner, repo = thing.paths[0].relative_to(root / folder).parts[:2]
            return Store(root / folder / owner / repo)
    return None


def _demo(root: Path) -> Iterator[Kept]:
    if (root / MODEL).is_file():
        yield Kept("demo", Kind.MODEL, (root / MODEL).stat().st_size, (root / MODEL,))
    for work in sorted(root.glob("demo-*")):
        if work.is_dir() and not work.is_symlink() and time.time() - work.stat().st_mtime > _LEFT_BEHIND_S:
            yield Kept("demo", Kind.UNFINISHED, _bytes(list(work.rglob("*"))), (work,))


def _kernels(folder: Path) -> Iterator[Kept]:
    paths = tuple(sorted((*folder.glob("*.kernel"), *folder.glob("*.overhead"))))  # the latter: what kernels took
    if paths:
        yield Kept("kernels", Kind.KERNELS, _bytes(paths), paths)


def _profiles(folder: Path) -> Iterator[Kept]:
    paths = tuple(sorted(folder.glob("*.npy")))
    if paths:
        yield Kept("profiles", Kind.PROFILES, _bytes(paths), paths)


def _of_repository(store: Store, kind: Kind) -> Iterator[Kept]:
    repo = f"{store.folder.parent.name}/{store.folder.name}"
    files = {file.path: file for file in store.files()}
    for names in dict.fromkeys(shard_names(path) for path in files):
        here = [files[name] for name in names if name in files]
        whole = len(here) == len(names)
        yield Kept(
            str(HubName(repo, names[0])),
            kind if whole else Kind.UNFINISHED,
            sum(file.nbytes for file in here),
            tuple(store.path(file.path) for file in here),
        )
    for part in store.parts():
        name = part.relative_to(store.folder).as_posix().rsplit(".", 2)[0]
        yield Kept(str(HubName(repo, name)), Kind.UNFINISHED, _bytes([part]), (part,))


def _bytes(paths: Sequence[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # gone meanwhile
            total += path.lstat().st_size if path.is_file() else 0
    return total
