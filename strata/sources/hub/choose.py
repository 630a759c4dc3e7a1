"""Which of a repository's files are one model, and which model a person means."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from strata.errors import ModelUnavailable, UsageError
from strata.sources.hub.name import HubName, shard_names

_COMPANIONS = ("mmproj", "imatrix")  # beside a model, of no use alone
_MOST_SHOWN = 40


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes
    ----------
    path : str
        Inside the repository, with forward slashes.
    nbytes : int
    checksum : str
        As hex: the SHA-256, or of a small file that Git itself keeps the SHA-1 of a Git blob.
    """

    path: str
    nbytes: int
    checksum: str = ""


@dataclass(frozen=True)
class HubModel:
    """One model: a file, or all files of a split set in order."""

    files: tuple[HubFile, ...]

    @property
    def path(self) -> str:
        """Path of the first file, by which the model is opened."""
        return self.files[0].path

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


def choose(name: HubName, files: Sequence[HubFile]) -> HubModel:
    """Find the model that `name` means among a repository's files.

    Raises
    ------
    UsageError
        The name does not say which of several models, or names a file that is not there.
    ModelUnavailable
        The repository has no GGUF model, or a set with a shard missing.
    """
    models = _models(files)
    if not models:
        raise ModelUnavailable(
            f"open model {name}",
            f"{name.repo} holds no .gguf file ({len(files):,} files of other kinds)",
            "Look for a repository of the same model whose name ends in GGUF",
        )
    if name.file is not None:
        first = shard_names(name.file)[0]
        model = next((model for model in models if model.path == first), None)
        if model is None:
            raise UsageError(f"open model {name}", *_no_such_file(name, models))
    else:
        main = [model for model in models if not PurePosixPath(model.path).name.lower().startswith(_COMPANIONS)]
        if len(main) != 1:
            raise UsageError(f"open model {name}", *_which(name, main or models))
        model = main[0]
    return _whole(name, model)


def shown_size(nbytes: int) -> str:
    """Write a number of bytes for people."""
    if nbytes < 1 << 20:
        return f"{nbytes:,} bytes"
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / (1 << 30):,.2f} GiB"


def _models(files: Sequence[HubFile]) -> list[HubModel]:
    """Group GGUF files into models, the smallest first; a set's missing shards have -1 bytes."""
    known = {file.path: file for file in files if file.path.lower().endswith(".gguf")}
    sets = dict.fromkeys(shard_names(path) for path in sorted(known))
    models = [HubModel(tuple(known.get(path, HubFile(path, -1)) for path in paths)) for paths in sets]
    return sorted(models, key=lambda model: model.nbytes)


def _whole(name: HubName, model: HubModel) -> HubModel:
    missing = [file.path for file in model.files if file.nbytes < 0]
    if missing:
        raise ModelUnavailable(
            f"open model {name}",
            f"{len(missing)} of {len(model.files)} shards are not there, first {missing[0]}",
            "Choose another model, or another repository that has it whole",
        )
    return model


def _which(name: HubName, models: Sequence[HubModel]) -> tuple[str, str]:
    return (
        f"it holds {len(models)} models:{_table(name, models)}",
        f"Type one of them, such as {_named(name, models[0])}",
    )


def _no_such_file(name: HubName, models: Sequence[HubModel]) -> tuple[str, str]:
    wanted = (name.file or "").lower()
    paths = {model.path.lower(): model for model in models}
    close = [paths[path] for path in difflib.get_close_matches(wanted, paths, n=3, cutoff=0.6)]
    close = close or [model for path, model in paths.items() if wanted in path]
    if close:
        return "there is no such file in it", f"Did you mean {' or '.join(_named(name, m) for m in close[:3])}?"
    return f"there is no such file in it, but:{_table(name, models)}", "Type one of them"


def _table(name: HubName, models: Sequence[HubModel]) -> str:
    width = max(len(_named(name, model)) for model in models[:_MOST_SHOWN])
    lines = []
    for model in models[:_MOST_SHOWN]:
        shards = f" in {len(model.files)} files" if len(model.files) > 1 else ""
        whole = all(file.nbytes >= 0 for file in model.files)
        size = shown_size(model.nbytes) if whole else "not whole"
        lines.append(f"\n    {_named(name, model):<{width}}  {size:>11}{shards}")
    more = f"\n    and {len(models) - _MOST_SHOWN} more" if len(models) > _MOST_SHOWN else ""
    return "".join(lines) + more


def _named(name: HubName, model: HubModel) -> str:
    return str(HubName(name.repo, model.path))
