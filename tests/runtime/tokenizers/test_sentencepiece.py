"""SentencePiece vocabularies: Mixtral's golden ids, byte fallback, the leading space, and headers that lie."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelFileError, UnsupportedModel
from strata.runtime.tokenizer import StreamDecoder, Tokenizer
from tests.runtime.vocabularies import golden, published, small_sentencepiece

# "▁" is how a space is written, so it does not come back; every other text does.
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁"))


@pytest.mark.parametrize("case", golden("tokens_mixtral.jsonl"), ids=lambda case: repr(case["text"]))
def test_golden_ids_and_pieces(case: dict[str, Any]) -> None:
    tokenizer = published("mixtral")
    assert tokenizer.encode(case["text"], parse_special=case.get("parse_special", False)) == case["ids"]
    if "pieces" in case:
        stream = StreamDecoder(tokenizer)
        assert [stream.push(token) for token in case["ids"]] == case["pieces"]
        assert stream.finish() == ""
        assert tokenizer.decode(case["ids"]) == case["text"]


@settings(deadline=None)
@given(text=TEXT)
def test_text_comes_back(text: str) -> None:
    tokenizer = published("mixtral")
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@settings(deadline=None)
@given(ids=st.lists(st.one_of(st.integers(3, 258), st.integers(0, 31999)), max_size=30))
def test_pieces_never_hold_half_a_character_and_join_to_the_whole(ids: list[int]) -> None:
    tokenizer = published("mixtral")
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_a_character_of_byte_tokens_is_shown_when_it_is_whole() -> None:
    tokenizer = published("mixtral")
    ids = tokenizer.encode("🦔", parse_special=False)
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in ids] == ["", "", "", "", "🦔"]  # the first is the leading space


def test_an_answer_that_continues_a_text_keeps_its_first_space() -> None:
    tokenizer = Tokenizer.from_metadata(small_sentencepiece())
    ids = tokenizer.encode("ab", parse_special=False)
    assert StreamDecoder(tokenizer).push(ids[0]) == "ab"
    assert StreamDecoder(tokenizer, continues=True).push(ids[0]) == " ab"


def test_only_the_space_that_was_put_in_front_is_taken_off() -> None:
    tokenizer = Tokenizer.from_metadata(small_sentencepiece())
    assert tokenizer.decode(tokenizer.encode("  ab ", parse_special=False)) == "  ab "
    plain = Tokenizer.from_metadata(small_sentencepiece(add_space_prefix=False))
    assert plain.decode(plain.encode(" ab", parse_special=False)) == " ab"
    assert plain.encode("ab", parse_special=False) == [tokenizer.encode("ab", parse_special=False)[0] - 1]


def test_the_better_score_is_merged_first() -> None:
    tokens = small_sentencepiece()["tokenizer.ggml.tokens"]
    other = np.array([0.0] * 259 + [-10, -11, -12, -3, -2, -1], dtype=np.float32)  # "ba" before "ab"
    for changes, pieces in (({}, ["▁", "b", "ab"]), ({"scores": other}, ["▁", "ba", "b"])):
        tokenizer = Tokenizer.from_metadata(small_sentencepiece(**changes))
        assert [tokens[i] for i in tokenizer.encode("bab", parse_special=False)] == pieces


def test_text_that_spells_a_byte_token_stays_text() -> None:
    tokenizer = published("mixtral")
    for text in ("<0x41>", "<s>", "</s>", "<unk>"):
        ids = tokenizer.encode(text, parse_special=False)
        assert len(ids) > 1
        assert tokenizer.decode(ids) == text


def test_bos_and_end() -> None:
    tokenizer = published("mixtral")
    assert tokenizer.adds_bos
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_ids) == ("<s>", "</s>", {2})
    assert tokenizer.encode("", parse_special=True, begin=True) == [1]
    assert not Tokenizer.from_metadata(small_sentencepiece(add_bos_token=False)).adds_bos


def test_a_vocabulary_without_byte_fallback_is_refused() -> None:
    types = np.array([2, 3, 3] + [6] * 255 + [1] * 7, dtype=np.int32)
    with pytest.raises(UnsupportedModel, match=r"1 of 256, the first is <0xFF>"):
        Tokenizer.from_metadata(small_sentencepiece(token_type=types))


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        (None, "no key tokenizer.ggml.scores"),
        (5, "not a list of numbers"),
        (["x"] * 265, "not a list of numbers"),
        ([0.0] * 264, "265 tokens but 264 scores"),
        ([float("nan")] * 265, "not a number"),
    ],
)
def test_scores_that_are_none_are_refused(scores: Any, problem: str) -> None:
    with pytest.raises(ModelFileError) as refused:
        Tokenizer.from_metadata(small_sentencepiece(scores=scores))
    assert problem in refused.value.found
