import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.gguf import strings
from strata.gguf.strings import decode_strings, skip_strings
from tests.gguf_maker import encode_string

short = st.text(min_size=1, max_size=12)
odd = st.sampled_from(["", "\0" * 7, "\0" * 20, "\1" + "\0" * 9, "x" * 255, "y" * 256, "z" * 257, "é" * 200])


@given(texts=st.lists(short | odd, max_size=40), repeats=st.integers(1, 60), before=st.binary(max_size=9))
def test_any_array_is_stepped_over_and_decoded(texts: list[str], repeats: int, before: bytes) -> None:
    texts = texts * repeats
    raw = b"".join(map(encode_string, texts))
    behind = encode_string("behind") * 3
    assert skip_strings(memoryview(before + raw + behind), len(before), len(texts)) == len(before) + len(raw)
    assert skip_strings(memoryview(before + raw), len(before), len(texts)) == len(before) + len(raw)
    assert decode_strings(raw, len(texts)) == texts


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 4096])
def test_any_window_gives_the_same(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(strings, "_WINDOW_BYTES", window)
    raw = b"".join(encode_string(f"token {index}" * (index % 40)) for index in range(3000))
    for count in (1, 2, 1023, 3000):
        end = skip_strings(memoryview(raw), 0, count)
        assert decode_strings(raw[:end], count)[-1] == f"token {count - 1}" * ((count - 1) % 40)
    assert end == len(raw)


@pytest.mark.parametrize("length", [2**32, 2**63, 2**64 - 1])
def test_a_length_that_leads_away_raises(length: int) -> None:
    raw = encode_string("a") * 5000 + struct.pack("<Q", length) + encode_string("b")
    with pytest.raises((struct.error, OverflowError)):
        skip_strings(memoryview(raw), 0, 5002)
    assert skip_strings(memoryview(raw), 0, 5001) > len(raw)  # the caller compares


def test_which_string_is_not_utf8() -> None:
    with pytest.raises(ValueError, match="element 2 is not valid UTF-8: invalid start byte at its byte 1"):
        decode_strings(b"".join(map(encode_string, ["a", "b", b"c\xff"])), 3)
