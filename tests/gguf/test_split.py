from pathlib import Path

import numpy as np
import pytest

from strata.errors import ModelFileError
from strata.gguf.reader import open_gguf
from tests.gguf_maker import Tensor, moe_model, write_gguf


def write_split(folder: Path, shards: int = 3, stem: str = "m", **changes: dict[str, object]) -> list[Path]:
    """Write a model in shards; ``shard2={...}`` changes keys of the second."""
    metadata, tensors = moe_model()
    paths = []
    for number in range(shards):
        keys: dict[str, object] = {} if number else dict(metadata)
        keys |= {"split.no": number, "split.count": shards, "split.tensors.count": len(tensors)}
        keys |= changes.get(f"shard{number + 1}", {})
        path = folder / f"{stem}-{number + 1:05}-of-{shards:05}.gguf"
        part = [Tensor(t.name, t.shape, t.type, bytes([number]) * t.nbytes) for t in tensors[number::shards]]
        paths.append(write_gguf(path, keys, part))
    return paths


def test_a_split_set_reads_as_one_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    _, tensors = moe_model()
    with open_gguf(paths[0]) as file:
        assert file.paths == tuple(paths)
        assert file.path == paths[0]
        assert file.file_bytes == sum(path.stat().st_size for path in paths)
        assert sorted(file.tensors) == sorted(tensor.name for tensor in tensors)
        for name, info in file.tensors.items():
            assert np.all(file.raw(name) == info.shard)
        sha = file.header_sha256
    (tmp_path / "other").mkdir()
    other = write_split(tmp_path / "other", shard3={"more": 1})
    with open_gguf(other[0]) as file:
        assert file.header_sha256 != sha  # the later shards' headers count too


def test_a_set_of_one_needs_no_numbered_name(tmp_path: Path) -> None:
    (path,) = write_split(tmp_path, shards=1)
    assert open_gguf(path.rename(tmp_path / "plain.gguf")).paths == (tmp_path / "plain.gguf",)


def test_another_shard_than_the_first_names_the_first(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    with pytest.raises(ModelFileError, match=r"this is shard 2 of 3\. Give the first shard: .*m-00001-of-00003\.gguf"):
        open_gguf(paths[1])
    with pytest.raises(ModelFileError, match="this is shard 3 of 3"):
        open_gguf(paths[2].rename(tmp_path / "renamed.gguf"))


def test_a_renamed_first_shard_says_how_it_should_be_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    with pytest.raises(ModelFileError, match=r"its name does not say so.*NAME-00001-of-00003\.gguf"):
        open_gguf(paths[0].rename(tmp_path / "model.gguf"))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"1 of 3 shards are missing .*m-00002-of-00003\.gguf"):
        open_gguf(paths[0])
    for path in paths[2:]:
        path.unlink()
    with pytest.raises(ModelFileError, match="2 of 3 shards are missing"):
        open_gguf(paths[0], header_only=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard2": {"split.no": 2}}, r"m-00002-of-00003\.gguf has split.no 2, not 1: it is of another set"),
        ({"shard3": {"split.count": 4}}, "has split.count 4, not 3"),
        ({"shard2": {"split.tensors.count": 5}}, "has split.tensors.count 5, not 27"),
        ({f"shard{n}": {"split.tensors.count": 28} for n in (1, 2, 3)}, "should hold 28 tensors, its shards hold 27"),
        ({"shard1": {"split.tensors.count": "many"}}, "'split.tensors.count' is 'many', not a number"),
        ({"shard1": {"split.count": 60_000}}, "'split.count' claims 60000 files"),
        ({"shard1": {"split.no": -1.0}}, "'split.no' is -1.0, not a number"),
    ],
)
def test_shards_that_do_not_belong_together(
    tmp_path: Path, changes: dict[str, dict[str, object]], message: str
) -> None:
    paths = write_split(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=message):
        open_gguf(paths[0])


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-{n:05}-of-00002.gguf" for n in (1, 2)]
    for number, path in enumerate(paths):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        write_gguf(path, keys, [Tensor("twin", (4,))])
    with pytest.raises(ModelFileError, match=r"'twin' is both in m-00001-of-00002\.gguf and in m-00002-of-00002\.gguf"):
        open_gguf(paths[0])


def test_a_cut_off_shard_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-4096])
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf has \d+ bytes, but its tensors reach"):
        open_gguf(paths[0])
    paths[1].write_bytes(b"<html>")
    with pytest.raises(ModelFileError, match=r"open shard .*m-00002-of-00003\.gguf: this is a web page"):
        open_gguf(paths[0])
