"""Byte-level BPE around its cuts: digits, normalisation, whole pieces, BOS."""

import functools
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.runtime.tokenizer import Tokenizer
from strata.runtime.tokenizers.pretokenizers import PRE_TOKENIZERS
from tests.runtime.vocabularies import small


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["1", "2", "3", "ab"]),  # digits one by one, so their merges never happen
        ("smollm", ["1", "2", "3", "ab"]),
        ("llama-bpe", ["123", "ab"]),  # up to three digits together
    ],
)
def test_pre_tokenizers_cut_digits_differently(pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_metadata(small(pre=pre, add_bos_token=False))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("123ab", parse_special=False)] == pieces


def test_only_qwen_normalises() -> None:
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "\u00e9"), ("smollm", decomposed), ("llama-bpe", decomposed)):
        tokenizer = Tokenizer.from_metadata(small(pre=pre))
        assert tokenizer.decode(tokenizer.encode(decomposed, parse_special=False)) == expected


def test_llama_takes_a_piece_that_is_a_token_whole() -> None:
    for pre, count in (("llama-bpe", 1), ("smollm", 2)):
        tokenizer = Tokenizer.from_metadata(small(pre=pre, merges=["1 2"]))  # "ab" is a token that no merge makes
        assert len(tokenizer.encode("ab", parse_special=False)) == count


@pytest.mark.parametrize(
    ("pre", "key", "adds"),
    [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_where_the_model_wants_it(pre: str, key: bool | None, adds: bool) -> None:
    tokenizer = Tokenizer.from_metadata(small(pre=pre, add_bos_token=key))
    bos = [tokenizer.bos_id] if adds else []
    body = tokenizer.encode("ab", parse_special=True)
    assert tokenizer.encode("ab", parse_special=True, begin=True) == bos + body
    # A template that wrote it already does not get a second one.
    assert tokenizer.encode("<|begin|>ab", parse_special=True, begin=True) == [tokenizer.bos_id, *body]


@functools.cache
def small_tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(small(pre=pre))


@settings(deadline=None)
@given(text=st.text(), pre=st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_text_comes_back(text: str, pre: str) -> None:
    tokenizer = small_tokenizer(pre)
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == expected


def test_merges_that_make_no_token_are_left_out_and_told_of() -> None:
    whole = Tokenizer.from_metadata(small())
    doubtful = Tokenizer.from_metadata(small(merges=["1 2", "12 4", "12 3", "1 zz", "a b"]))
    assert doubtful.encode("123ab", parse_special=False) == whole.encode("123ab", parse_special=False)
    assert whole.doubts == ()
    assert [text.split(":")[0] for text in doubtful.doubts] == [
        "2 of the tokenizer's 5 merges make no token and are left out"
    ]
