import hashlib
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata.errors import ModelFileError, UsageError
from strata.gguf.reader import open_gguf
from tests.gguf_maker import Tensor, gguf_bytes, moe_model, write_gguf

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
MODELS = sorted(GOLDEN.glob("*.gguf"))


def assert_same_as_gguf_py(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        assert (ours.version, ours.alignment) == (theirs.fields["GGUF.version"].contents(), theirs.alignment)
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            value = ours.metadata[key]
            expected = theirs.fields[key].contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape.tolist())
            assert (info.type, info.nbytes, info.offset, info.elements, info.shard) == (
                tensor.tensor_type,
                tensor.n_bytes,
                tensor.data_offset,
                tensor.n_elements,
                0,
            )
            np.testing.assert_array_equal(ours.raw(tensor.name), tensor.data.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_golden_models_read_as_gguf_py_reads_them(path: Path) -> None:
    assert_same_as_gguf_py(path)


def test_a_real_vocabulary_reads_as_gguf_py_reads_it() -> None:
    assert_same_as_gguf_py(GOLDEN / "vocab" / "smollm2-vocab.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path: Path, version: int) -> None:
    numbers = [np.array([1, 2, 3], dtype) for dtype in ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]]
    metadata: dict[str, object] = {f"array.{array.dtype.name}": array for array in numbers}
    metadata |= {"flags": np.array([True, False]), "none": [], "texts": ["a", "", "ñ\0b"], "text": "é", "yes": True}
    metadata |= {"number": 7, "half": 0.5, "general.alignment": 64}
    path = write_gguf(tmp_path / "m.gguf", metadata, [Tensor("t", (3,)), Tensor("u", (2, 2))], version=version)
    assert_same_as_gguf_py(path)
    file = open_gguf(path)
    for array in numbers:
        value = file.metadata[f"array.{array.dtype.name}"]
        assert isinstance(value, np.ndarray)
        assert value.dtype == array.dtype
        assert not value.flags.writeable
    assert file.version == version
    assert file.metadata["texts"] == ["a", "", "ñ\0b"]


def test_array_lengths_come_without_decoding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"broken": [b"\xff"] * 3, "sound": ["a", "b"], "number": 1})
    metadata = open_gguf(path).metadata
    assert [metadata.array_length(key) for key in ("broken", "sound", "number", "absent")] == [3, 2, None, None]
    assert metadata["sound"] is metadata["sound"]
    with pytest.raises(ModelFileError, match="metadata key 'broken': element 0 is not valid UTF-8"):
        metadata["broken"]


def test_raw_is_a_read_only_view_that_outlives_the_file() -> None:
    with open_gguf(GOLDEN / "llama.gguf") as file:
        raw = file.raw("output_norm.weight")
        info = file.tensors["output_norm.weight"]
        tokens = file.metadata.array_length("tokenizer.ggml.tokens")
    whole = (GOLDEN / "llama.gguf").read_bytes()
    assert raw.tobytes() == whole[info.offset : info.offset + info.nbytes]
    assert raw.shape == (info.nbytes,)
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    with pytest.raises(ValueError, match="is closed"):
        file.raw("output_norm.weight")
    assert tokens == 512
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 512  # type: ignore[arg-type]


def test_header_bytes_and_hash_name_the_header_alone(tmp_path: Path) -> None:
    metadata, tensors = moe_model()
    header = gguf_bytes(metadata, tensors, weights=False)
    zeros = open_gguf(write_gguf(tmp_path / "zeros.gguf", metadata, tensors))
    tensors[0] = Tensor(tensors[0].name, tensors[0].shape, data=b"\1" * tensors[0].nbytes)
    ones = open_gguf(write_gguf(tmp_path / "ones.gguf", metadata, tensors))
    assert zeros.header_bytes == len(header)
    assert zeros.header_sha256 == ones.header_sha256 == hashlib.sha256(header).hexdigest()
    assert zeros.file_bytes == (tmp_path / "zeros.gguf").stat().st_size


def test_a_header_without_weights_opens_for_planning_only(tmp_path: Path) -> None:
    metadata, tensors = moe_model()
    whole = open_gguf(write_gguf(tmp_path / "whole.gguf", metadata, tensors))
    path = write_gguf(tmp_path / "header.gguf", metadata, tensors, weights=False)
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' is cut off"):
        open_gguf(path)
    header = open_gguf(path, header_only=True)
    assert header.tensors == whole.tensors
    assert header.header_sha256 == whole.header_sha256
    last = max(whole.tensors.values(), key=lambda tensor: tensor.offset)
    assert header.file_bytes == last.offset + last.nbytes
    assert whole.present("token_embd.weight")
    assert not header.present("token_embd.weight")
    with pytest.raises(ModelFileError, match="Give the whole model"):
        header.raw("token_embd.weight")


def test_a_missing_path_suggests_what_lies_beside(tmp_path: Path) -> None:
    write_gguf(tmp_path / "Qwen3-30B-Q4_K_M.gguf", {})
    for wrong in ("Qwen3-30B-Q4_K_S.gguf", "qwen3-30B-Q4_K_M.gguf", "Qwen3-30B-Q4_K_M"):
        with pytest.raises(UsageError, match=r"Did you mean .*Qwen3-30B-Q4_K_M\.gguf") as caught:
            open_gguf(tmp_path / wrong)
        assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"this is a folder.*Did you mean .*Qwen3-30B-Q4_K_M\.gguf"):
        open_gguf(tmp_path)
    for nowhere in (tmp_path / "no" / "where.gguf", tmp_path / "bad\0name.gguf"):
        with pytest.raises(UsageError, match="there is no such file"):
            open_gguf(nowhere)


def test_odd_files_are_refused_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelFileError, match="the file is empty"):
        open_gguf(tmp_path / "empty.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(UsageError, match="not a regular file"):
            open_gguf(tmp_path / "pipe.gguf")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_link_to_nothing_is_named_as_that_and_never_suggested(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(UsageError, match="a link to what is not there") as refusal:
        open_gguf(tmp_path / "model.gguf")
    assert "Did you mean" not in refusal.value.remedy


def test_a_path_that_no_file_can_have_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no file can have this path"):
        open_gguf("x" * 5000)
    with pytest.raises(UsageError):
        open_gguf("a\0b")
