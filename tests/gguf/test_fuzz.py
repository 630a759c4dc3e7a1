"""Whatever the bytes, opening a model ends in a file that reads or in one StrataError, soon and in little memory."""

import struct
import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import StrataError
from strata.gguf.metadata import ValueType
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.gguf.types import TensorType
from tests.gguf_maker import Raw, Tensor, encode_string, gguf_bytes, moe_model

PEAK_BYTES = 4 << 20  # the files here have at most 32 KiB
SECONDS = 5.0

SOUND = gguf_bytes(*moe_model(layers=1))
HEADER_BYTES = len(gguf_bytes(*moe_model(layers=1), weights=False))

fuzz = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def read_all(path: Path) -> None:
    """Use everything that a file offers."""
    for header_only in (True, False):
        with open_gguf(path, header_only=header_only) as file:
            assert len(file.header_sha256) == 64
            for name, tensor in file.tensors.items():
                if file.present(name):
                    assert len(file.raw(name)) == tensor.nbytes
            for key in file.metadata:
                value, length = file.metadata[key], file.metadata.array_length(key)
                assert length is None or (isinstance(value, list | np.ndarray) and len(value) == length)
            msgspec.json.encode(read_model_facts(file))


def survives(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    began = time.perf_counter()
    tracemalloc.start()
    message = ""
    try:
        read_all(path)
    except StrataError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(message) < 1500
    assert peak < PEAK_BYTES
    assert time.perf_counter() - began < SECONDS


def test_the_sound_file_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SOUND)
    read_all(path)


hostile_numbers = st.sampled_from([0, 1, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
in_header = st.integers(0, HEADER_BYTES - 1)
mutations = st.one_of(
    st.tuples(st.just("set"), in_header, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("set"), in_header, hostile_numbers.map(lambda number: struct.pack("<Q", number))),
    st.tuples(st.just("set"), in_header, hostile_numbers.map(lambda number: struct.pack("<I", number & 0xFFFFFFFF))),
    st.tuples(st.just("insert"), in_header, st.binary(min_size=1, max_size=64)),
    st.tuples(st.just("delete"), in_header, st.integers(1, 64).map(bytes)),
    st.tuples(st.just("cut"), st.integers(0, len(SOUND)), st.just(b"")),
)


@fuzz
@given(changes=st.lists(mutations, min_size=1, max_size=4))
def test_mutations_of_a_sound_file(tmp_path: Path, changes: list[tuple[str, int, bytes]]) -> None:
    data = bytearray(SOUND)
    for kind, at, change in changes:
        if kind == "set":
            data[at : at + len(change)] = change
        elif kind == "insert":
            data[at:at] = change
        elif kind == "delete":
            del data[at : at + len(change)]
        else:
            del data[at:]
    survives(tmp_path / "m.gguf", bytes(data))


architecture_keys = [key for key in moe_model()[0] if key.startswith("qwen3moe.")]
keys = st.sampled_from(
    [
        *architecture_keys,
        "general.architecture",
        "general.alignment",
        "split.count",
        "split.no",
        "tokenizer.ggml.tokens",
    ]
)
arrays = st.builds(
    lambda kind, count, data: Raw(ValueType.ARRAY, struct.pack("<IQ", kind, count) + data),
    st.integers(0, 14),
    hostile_numbers | st.integers(0, 8),
    st.binary(max_size=64) | st.lists(st.binary(max_size=6).map(encode_string), max_size=4).map(b"".join),
)
values = st.one_of(
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.booleans(),
    st.text(max_size=20),
    st.binary(max_size=20),
    arrays,
    st.builds(Raw, st.integers(0, 14), st.binary(max_size=16)),
)
sizes = st.one_of(st.sampled_from([1, 4, 32, 64, 256]), hostile_numbers)
tensor_types = st.sampled_from(list(TensorType))
tensors = st.builds(
    Tensor,
    name=st.sampled_from(
        ["t", "token_embd.weight", "blk.0.ffn_up_exps.weight", "blk.99.ffn_up_exps.bias", "blk.0.ssm_a"]
    ),
    shape=st.lists(sizes, max_size=6).map(tuple),
    type=tensor_types,
    offset=hostile_numbers | st.integers(0, 8).map(lambda block: 32 * block),
)


@fuzz
@given(
    changed=st.dictionaries(keys, values, max_size=4),
    repeated=st.lists(st.tuples(st.text(max_size=5), values), max_size=2),
    added=st.lists(tensors, max_size=3),
    counts=st.tuples(st.none() | hostile_numbers, st.none() | hostile_numbers),
)
def test_structured_hostile_headers(
    tmp_path: Path,
    changed: dict[str, object],
    repeated: list[tuple[str, object]],
    added: list[Tensor],
    counts: tuple[int | None, int | None],
) -> None:
    metadata, sound = moe_model(layers=1)
    pairs = [*(metadata | changed).items(), *repeated]
    data = gguf_bytes(pairs, [*sound, *added], weights=False, key_count=counts[0], tensor_count=counts[1])
    survives(tmp_path / "m.gguf", data)


@fuzz
@given(data=st.binary(max_size=400), prefix=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", SOUND[:24]]))
def test_noise(tmp_path: Path, data: bytes, prefix: bytes) -> None:
    survives(tmp_path / "m.gguf", prefix + data)


def test_a_huge_array_in_a_sparse_file_is_bounded(tmp_path: Path) -> None:
    """A terabyte of zeros costs nothing to make, and reads as so many empty strings."""
    path = tmp_path / "sparse.gguf"
    for count, fits in ((1 << 20, True), (1 << 30, False)):
        array = Raw(ValueType.ARRAY, struct.pack("<IQ", ValueType.STRING, count))
        with path.open("wb") as file:
            file.write(gguf_bytes({"k": array}, weights=False))
            file.truncate(1 << 40)
        began = time.perf_counter()
        if fits:
            assert open_gguf(path).metadata.array_length("k") == count
        else:
            with pytest.raises(StrataError, match="that a header may take"):
                open_gguf(path)
        assert time.perf_counter() - began < SECONDS
