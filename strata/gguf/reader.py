"""Opening a GGUF model, one file or a split set, without reading its weights."""

from __future__ import annotations

import difflib
import errno
import hashlib
import mmap
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata.errors import ModelFileError, UsageError
from strata.gguf.header import Header, read_header
from strata.gguf.metadata import Metadata, Scalar, Value
from strata.gguf.split import check_set, shard_paths
from strata.gguf.tensors import TensorInfo
from strata.gguf.wording import DAMAGED, shown

__all__ = ["GGUFFile", "Scalar", "TensorInfo", "Value", "open_gguf"]


class GGUFFile:
    """An open model. Use `open_gguf` to get one, and `with` or `close` to let go of it.

    Attributes
    ----------
    path : Path
        The file, or the first of the set.
    paths : tuple of Path
        All files of the set.
    version : int
        GGUF version, 2 or 3.
    metadata : Metadata
        Keys and values of the first file, arrays decoded on access.
    tensors : mapping of str to TensorInfo
        Every tensor of every shard by name, in file order.
    header_bytes : int
        Of the first file, up to the end of its tensor index.
    file_bytes : int
        Of all files; of a file cut off after its header, what the whole one has.
    alignment : int
        Bytes to a multiple of which each tensor's offset is padded (first file).
    """

    def __init__(self, paths: tuple[Path, ...], headers: tuple[Header, ...], maps: tuple[mmap.mmap, ...]) -> None:
        first = headers[0]
        self.path = paths[0]
        self.paths = paths
        self.version = first.version
        self.metadata: Metadata = first.metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor for header in headers for tensor in header.tensors}
        )
        self.header_bytes = first.nbytes
        self.file_bytes = sum(max(len(data), header.data_end) for data, header in zip(maps, headers, strict=True))
        self.alignment = first.alignment
        self._header_sizes = tuple(header.nbytes for header in headers)
        self._maps = maps

    @cached_property
    def header_sha256(self) -> str:
        """SHA-256 over the header bytes of all shards in order, as hex: the identity of the model's layout."""
        digest = hashlib.sha256()
        for shard, nbytes in enumerate(self._header_sizes):
            digest.update(memoryview(self._data(shard))[:nbytes])
        return digest.hexdigest()

    def present(self, name: str) -> bool:
        """Whether the tensor's bytes are there; False for what a file cut off after its header has lost."""
        tensor = self.tensors[name]
        return tensor.offset + tensor.nbytes <= len(self._data(tensor.shard))

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as stored.

        Parameters
        ----------
        name : str
            One of `tensors`.

        Returns
        -------
        NDArray[np.uint8], shape (nbytes,)
            A read-only view of the file; nothing is read until it is touched. It stays valid after `close`.

        Raises
        ------
        KeyError
            When there is no tensor of this name.
        ModelFileError
            When the file was cut off after its header.
        ValueError
            After `close`.
        """
        tensor = self.tensors[name]
        if not self.present(name):
            raise ModelFileError(
                f"read tensor {shown(name)} of {self.path}",
                f"{self.paths[tensor.shard].name} ends before it",
                "Give the whole model, not only its header",
            )
        return np.frombuffer(self._data(tensor.shard), dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def close(self) -> None:
        """Let go of the files. Views that `raw` gave, and `metadata`, keep theirs mapped until they are gone too."""
        self._maps = ()

    def _data(self, shard: int) -> mmap.mmap:
        if not self._maps:
            raise ValueError(f"{self.path} is closed")
        return self._maps[shard]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | Path, *, header_only: bool = False) -> GGUFFile:
    """Open a GGUF model: read its header, map its weights.

    Parameters
    ----------
    path : str or Path
        The file, or the first shard of a split set.
    header_only : bool
        Allow files that end before their weights do, as for planning from the first megabytes of a model.

    Raises
    ------
    UsageError
        When there is no such file.
    ModelFileError
        When the file, or any shard, is not a sound GGUF file of version 2 or 3.
    """
    path = Path(path)
    asked = f"open model {path}"
    first_map = _map(path, asked)
    first = read_header(first_map, asked, shard=0)
    paths = shard_paths(path, first.metadata, asked)
    maps, headers = [first_map], [first]
    for shard, other in enumerate(paths[1:], start=1):
        asked_shard = f"open shard {other}"
        maps.append(_map(other, asked_shard))
        headers.append(read_header(maps[-1], asked_shard, shard))
    if len(paths) > 1:
        check_set(paths, headers, asked)
    if not header_only:
        for shard_path, data, header in zip(paths, maps, headers, strict=True):
            _check_complete(shard_path, len(data), header, asked)
    return GGUFFile(tuple(paths), tuple(headers), tuple(maps))


def _map(path: Path, asked: str) -> mmap.mmap:
    try:
        if not path.exists():
            found = "this is a link to what is not there" if path.is_symlink() else "there is no such file"
            raise UsageError(asked, found, _suggest(path))
        if path.is_dir():
            raise UsageError(asked, "this is a folder", _suggest(path / "model.gguf"))
        if not path.is_file():  # opening a pipe would wait for ever
            raise UsageError(asked, "this is not a regular file", "Give the path of a .gguf file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelFileError(asked, "the file is empty", "Download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
            raise UsageError(asked, "no file can have this path", "Give the path of a .gguf file") from None
        raise ModelFileError(asked, f"the system refuses: {error.strerror}", _remedy(error)) from None


def _remedy(error: OSError) -> str:
    if error.errno == errno.ENOMEM:  # a mapping takes no RAM, but it counts against `ulimit -v`
        return "Raise the limit on this process's address space (ulimit -v)"
    return "Check the file's permissions"


def _suggest(path: Path) -> str:
    """Name the files beside `path`, in a folder below or in one named alike, that may have been meant."""
    models: dict[str, Path] = {}
    try:
        folder = path.parent
        if not folder.is_dir():
            beside = [each.name for each in folder.parent.iterdir() if each.is_dir()]
            alike = difflib.get_close_matches(folder.name, beside, n=1)
            folder = folder.with_name(alike[0]) if alike else folder
        for pattern in ("*.gguf", "*/*.gguf"):
            for model in sorted(folder.glob(pattern)):
                if model.is_file():
                    models.setdefault(model.name, model)
    except (OSError, ValueError):  # an unreadable folder, or a path that no system can have
        pass
    close = difflib.get_close_matches(path.name, models, n=3, cutoff=0.5) or list(models)[:3]
    if not close:
        return "Give the path of a .gguf file"
    return "Did you mean " + " or ".join(str(models[name]) for name in close) + "?"


def _check_complete(path: Path, size: int, header: Header, asked: str) -> None:
    if header.data_end <= size:
        return
    cut = next(tensor.name for tensor in header.tensors if tensor.offset + tensor.nbytes > size)
    raise ModelFileError(
        asked,
        f"{path.name} has {size} bytes, but its tensors reach to byte {header.data_end} ({shown(cut)} is cut off)",
        DAMAGED,
    )
