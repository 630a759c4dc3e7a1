"""Damaged and hostile headers: each gives one clear error, bounded in time and memory."""

import struct
import tracemalloc
from functools import partial

import pytest

from strata.errors import ModelFileError
from strata.gguf import cursor
from strata.gguf.header import read_header
from strata.gguf.metadata import ValueType
from strata.gguf.types import TensorType
from tests.gguf_maker import Raw, Tensor, encode_string, gguf_bytes, moe_model

HUGE = 1 << 63


def array(kind: int, count: int, data: bytes = b"") -> Raw:
    return Raw(ValueType.ARRAY, struct.pack("<IQ", kind, count) + data)


def length(nbytes: int) -> bytes:
    return struct.pack("<Q", nbytes)


header = partial(gguf_bytes, weights=False)


def one(*tensors: Tensor, **metadata: object) -> bytes:
    return header({f"general.{key}": value for key, value in metadata.items()}, tensors)


T = Tensor("t", (32,))

CASES: dict[str, tuple[bytes, str]] = {
    "web page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "this is a web page.*resolve, not blob"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer.*git lfs pull"),
    "zip": (b"PK\x03\x04archive/data.pkl", "ZIP archive"),
    "zeros": (bytes(4096), "begins with zeros"),
    "text": (b"hello world", "begins with b'hell', not with b'GGUF'"),
    "wrong magic": (header({}, magic=b"GGML"), "begins with b'GGML'"),
    "magic cut": (b"GG", "begins with b'GG'"),
    "magic alone": (b"GGUF", "the file ends at byte 4, inside the version"),
    "version 1": (header({}, version=1), "GGUF version 1,.*Convert the model again"),
    "version 4": (header({}, version=4), "GGUF version 4; versions 2 and 3.*Update Strata"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge key count": (header({}, key_count=HUGE), f"claims {HUGE} metadata keys"),
    "too many keys": (header({}, key_count=9), "the file ends at byte 24, inside the name of metadata key 0"),
    "huge tensor count": (header({}, tensor_count=HUGE), f"claims {HUGE} tensors"),
    "too many tensors": (header({}, tensor_count=1), "inside the name of tensor 0"),
    "huge key length": (header({}, key_count=1) + length(HUGE), f"claims to be {HUGE} bytes long"),
    "long key": (header({"k" * 65_536: 1}), "metadata key 0 claims to be 65536 bytes long"),
    "key twice": (header([("k", 1), ("k", 2)]), "key 'k' is there twice"),
    "key not UTF-8": (header([(b"\xc3(", 1)]), "name of metadata key 0 is not valid UTF-8"),
    "unknown value type": (header({"k": Raw(13, b"")}), "'k' has the unknown value type 13"),
    "value cut": (header({"k": Raw(ValueType.UINT64, b"1234")}), "ends at byte 41, inside metadata key 'k'"),
    "huge string": (header({"k": Raw(ValueType.STRING, length(HUGE))}), "'k' claims to be"),
    "string cut": (header({"k": Raw(ValueType.STRING, length(9) + b"abc")}), "inside metadata key 'k'"),
    "string not UTF-8": (header({"k": b"ab\xff"}), "'k' is not valid UTF-8: invalid start byte at its byte 2"),
    "array of arrays": (header({"k": array(ValueType.ARRAY, 1)}), "array of arrays"),
    "array of unknown": (header({"k": array(99, 1)}), "unknown value type 99"),
    "huge array": (header({"k": array(ValueType.INT64, HUGE)}), "inside metadata key 'k'"),
    "array cut": (header({"k": array(ValueType.INT32, 5, bytes(19))}), "inside metadata key 'k'"),
    "huge string array": (header({"k": array(ValueType.STRING, HUGE, bytes(64))}), "inside metadata key 'k'"),
    "huge string in array": (
        header({"k": array(ValueType.STRING, 1, length(2**64 - 1))}),
        "inside metadata key 'k'",
    ),
    "huge strings in array": (
        header({"k": array(ValueType.STRING, 3, length(2**63) + bytes(16))}),
        "inside metadata key 'k'",
    ),
    "string array cut": (
        header({"k": array(ValueType.STRING, 2, encode_string("ab") + length(7) + b"abc")}),
        "inside metadata key 'k'",
    ),
    "alignment 0": (one(T, alignment=0), "'general.alignment' is 0, not a power of two"),
    "alignment 24": (one(T, alignment=24), "is 24, not a power of two"),
    "alignment text": (one(T, alignment="x" * 1000), "is 'xxx.*xxx', not a power of two"),
    "alignment list": (one(T, alignment=["y"] * 1000), r"is \['y', .*\.\.\.\], not a power of two"),
    "no dimensions": (one(Tensor("t", (), offset=0)), "'t' has 0 dimensions, not 1 to 4"),
    "five dimensions": (one(Tensor("t", (1, 1, 1, 1, 1))), "has 5 dimensions"),
    "zero dimension": (one(Tensor("t", (32, 0))), r"impossible shape \(32, 0\)"),
    "overflowing shape": (one(Tensor("t", (1 << 32, 1 << 32))), "impossible shape"),
    "negative dimension": (one(Tensor("t", (2**64 - 1,))), "impossible shape"),
    "tensor not UTF-8": (
        header({}, tensor_count=1) + length(1) + b"\xff",
        "name of tensor 0 is not valid UTF-8",
    ),
    "tensor name long": (header({}, tensor_count=1) + length(HUGE), "name of tensor 0 claims to be"),
    "tensor cut": (one(T)[:-1], "inside tensor 't'"),
    "tensor twice": (one(T, T), "tensor 't' is there twice"),
    "half a block": (one(Tensor("t", (48, 2), TensorType.Q4_0)), "rows of 48, no multiple of Q4_0's 32"),
    "misaligned": (one(Tensor("t", (32,), offset=4)), "'t' begins at byte .*, not at a multiple of 32"),
    "overlap": (one(Tensor("t", (32,), offset=0), Tensor("u", (32,), offset=96)), "tensors 't' and 'u' overlap"),
    "same place": (one(Tensor("u", (32,), offset=0), Tensor("t", (32,), offset=0)), "tensors 'u' and 't' overlap"),
    "negative offset": (one(Tensor("t", (32,), offset=2**64 - 32)), "past the end of any file"),
}


def of_type(number: int) -> bytes:
    """A tensor of a type that the maker cannot size."""
    data = bytearray(one(T))
    data[-12:-8] = struct.pack("<I", number)
    return bytes(data)


CASES["unknown type"] = (of_type(99), "tensor 't' has the unknown type number 99")
CASES["withdrawn type"] = (of_type(31), "type number 31, which ggml has withdrawn. Convert the model again")


@pytest.mark.parametrize(("data", "message"), CASES.values(), ids=CASES.keys())
def test_a_bad_header_is_refused_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        read_header(data, "open model m.gguf", shard=0)
    assert caught.value.asked == "open model m.gguf"
    assert caught.value.remedy
    assert len(str(caught.value)) < 600


def test_every_truncation_of_a_sound_header_is_refused() -> None:
    metadata, tensors = moe_model(layers=1)
    whole = header(metadata, tensors)
    read_header(whole, "open", shard=0)
    for end in range(len(whole)):
        with pytest.raises(ModelFileError):
            read_header(whole[:end], "open", shard=0)


def test_names_in_messages_are_escaped_and_short() -> None:
    with pytest.raises(ModelFileError) as caught:
        read_header(one(Tensor("\x1b[31m" + "n" * 60_000, (0,))), "open", shard=0)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_header_larger_than_any_real_one_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_HEADER_BYTES", 1 << 20)
    data = gguf_bytes({"k": array(ValueType.STRING, 1 << 17, bytes(8 << 20))})
    with pytest.raises(ModelFileError, match="past the 1 MiB that a header may take"):
        read_header(data, "open", shard=0)
    data = gguf_bytes({"k": array(ValueType.STRING, 1, length(2 << 20) + bytes(8 << 20))})
    with pytest.raises(ModelFileError, match="past the 1 MiB that a header may take"):
        read_header(data, "open", shard=0)


def test_half_a_million_strings_cost_no_memory_until_asked() -> None:
    data = header({"k": array(ValueType.STRING, 500_000, encode_string("text") * 500_000)})
    tracemalloc.start()
    try:
        metadata = read_header(data, "open", shard=0).metadata
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert metadata["k"] == ["text"] * 500_000
