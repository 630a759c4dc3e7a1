"""Split sets: a model in several files, named ``NAME-00001-of-00003.gguf`` and numbered by their metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from strata.errors import ModelFileError
from strata.gguf.header import Header
from strata.gguf.metadata import Metadata
from strata.gguf.wording import shown

MAX_SHARDS = 1 << 12
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_paths(path: Path, first: Metadata, asked: str) -> list[Path]:
    """Name every file of the set that `path` begins; just `path` when the model is one file.

    Raises
    ------
    ModelFileError
        When `path` is another shard than the first, is not named like one, or a shard is missing.
    """
    count = _number(first, "split.count", asked, default=1)
    if count <= 1:
        return [path]
    if count > MAX_SHARDS:
        raise ModelFileError(asked, f"metadata key 'split.count' claims {count} files", "Fetch the file again")
    name = _SHARD_NAME.fullmatch(path.name)
    number = _number(first, "split.no", asked)
    if number != 0:
        found = f"this is shard {number + 1} of {count}"
        if name is None:
            raise ModelFileError(asked, found, "Give the first shard of the set")
        raise ModelFileError(asked, found, f"Give the first shard: {_shard(path, name['stem'], 1, count)}")
    if name is None or int(name["number"]) != 1 or int(name["count"]) != count:
        raise ModelFileError(
            asked,
            f"this is the first of {count} shards, but its name does not say so",
            f"Give the shards their names back: NAME-00001-of-{count:05}.gguf and so on",
        )
    paths = [_shard(path, name["stem"], number, count) for number in range(1, count + 1)]
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFileError(
            asked,
            f"{len(missing)} of {count} shards are missing from {path.parent}: {', '.join(missing[:3])}{more}",
            "Put all shards of the model into one folder",
        )
    return paths


def check_set(paths: Sequence[Path], headers: Sequence[Header], asked: str) -> None:
    """Refuse shards that do not belong together.

    Raises
    ------
    ModelFileError
        When the numbering or the number of tensors contradicts the first shard, or a tensor is in two shards.
    """
    remedy = "Fetch all shards again, from one place"
    total = _number(headers[0].metadata, "split.tensors.count", asked)
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        expected = {"split.no": number, "split.count": len(paths), "split.tensors.count": total}
        for key, value in expected.items():
            actual = _number(header.metadata, key, asked)
            if actual != value:
                raise ModelFileError(
                    asked, f"{path.name} has {key} {actual}, not {value}: it is of another set", remedy
                )
    present = sum(len(header.tensors) for header in headers)
    if present != total:
        raise ModelFileError(asked, f"the set should hold {total} tensors, its shards hold {present}", remedy)
    names: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in names:
                first, second = paths[names[tensor.name]].name, paths[tensor.shard].name
                raise ModelFileError(asked, f"tensor {shown(tensor.name)} is both in {first} and in {second}", remedy)
            names[tensor.name] = tensor.shard


def _shard(path: Path, stem: str, number: int, count: int) -> Path:
    return path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")


def _number(metadata: Metadata, key: str, asked: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or value < 0:
        raise ModelFileError(asked, f"metadata key {key!r} is {shown(value)}, not a number", "Fetch the file again")
    return value
