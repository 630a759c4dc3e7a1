"""The tokenizer: golden ids and pieces of published vocabularies, BOS and EOS, and metadata that lies."""

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelFileError, UnsupportedModel, UsageError
from strata.runtime.tokenizer import StreamDecoder, Tokenizer
from tests.runtime.vocabularies import BYTES, TRIMMED, golden, published, small


def case_id(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case.get('kind', case['ids'])}"


@pytest.mark.parametrize("case", golden("tokens.jsonl") + golden("tokens_qwen36.jsonl"), ids=case_id)
def test_golden_ids_and_pieces(case: dict[str, Any]) -> None:
    tokenizer = published(case["model"])
    assert tokenizer.encode(case["text"], parse_special=case["parse_special"]) == case["ids"]
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in case["ids"]] == case["pieces"]
    assert stream.finish() == ""
    assert tokenizer.decode(case["ids"]) == case.get("decoded", case["text"])


@pytest.mark.parametrize("case", golden("tokens_published.jsonl"), ids=lambda case: f"{case['model']}-{case['text']!r}")
def test_ids_of_published_tokenizers(case: dict[str, Any]) -> None:
    tokenizer = published(case["model"])
    assert tokenizer.encode(case["text"], parse_special=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]


@settings(deadline=None)
@given(text=st.text(), model=st.sampled_from(["qwen3", *TRIMMED]))
def test_text_comes_back(text: str, model: str) -> None:
    tokenizer = published(model)
    composed = unicodedata.normalize("NFC", text) if model.startswith("qwen") else text
    for parse_special in (False, True):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=parse_special)) == composed


@pytest.mark.parametrize("case", golden("decode.jsonl"), ids=case_id)
def test_golden_streams(case: dict[str, Any]) -> None:
    tokenizer = published(case["model"])
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in case["ids"]] == case["pieces"]
    assert stream.finish() == case["tail"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    assert (tokenizer.encode(case["text"], parse_special=True) == case["ids"]) == case["encodes_back"]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_pieces_join_to_the_whole(ids: list[int]) -> None:
    stream = StreamDecoder(published("smollm2"))
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == published("smollm2").decode(ids)


def test_special_ids() -> None:
    qwen, smollm = published("qwen3"), published("smollm2")
    assert qwen.eos_ids == {151643, 151645}  # <|endoftext|>, <|im_end|>
    assert smollm.eos_ids == {0, 2}
    assert (qwen.eos_token, smollm.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert (len(qwen), len(smollm)) == (151936, 49152)
    assert qwen.is_control(151645)
    assert not qwen.is_control(151667)  # <think> is user-defined, and for people to read
    assert qwen.encode("<think>", parse_special=False) == [151667]


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


def test_no_bos_without_an_id() -> None:
    tokenizer = Tokenizer.from_metadata(small(bos_token_id=None, add_bos_token=True))
    assert not tokenizer.adds_bos
    assert tokenizer.bos_token == ""


def test_end_tokens_from_keys_and_from_names() -> None:
    tokenizer = Tokenizer.from_metadata(small(eos_token_id=3, eot_token_id=4, eom_token_id=5))
    assert tokenizer.eos_ids == {3, 4, 5, len(tokenizer) - 1}


def test_a_file_without_types_has_normal_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(small(token_type=None))
    assert tokenizer.encode("<|begin|>", parse_special=True) == tokenizer.encode("<|begin|>", parse_special=False)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UsageError, match="character 1"):
        Tokenizer.from_metadata(small()).encode("a\udcff", parse_special=False)


@pytest.mark.parametrize("token", [-1, 261])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ModelFileError, match="261 tokens"):
        Tokenizer.from_metadata(small()).decode([token])


def test_another_tokenizer_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'other'") as refused:
        Tokenizer.from_metadata(small(model="other"))
    assert "gpt2" in refused.value.remedy
    assert "llama" in refused.value.remedy


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, "no key tokenizer.ggml.model"),
        ({"pre": None}, "no key tokenizer.ggml.pre"),
        ({"tokens": None}, "no key tokenizer.ggml.tokens"),
        ({"merges": None}, "no key tokenizer.ggml.merges"),
        ({"model": 5}, "not a string"),
        ({"tokens": 5}, "not a list of strings"),
        ({"tokens": "abc"}, "not a list of strings"),
        ({"tokens": []}, "is empty"),
        ({"tokens": np.arange(261)}, "other than strings"),
        ({"token_type": np.ones(260, dtype=np.int32)}, "261 tokens but 260 token types"),
        ({"token_type": ["x"] * 261}, "not a list of integers"),
        ({"token_type": 1}, "not a list of integers"),
        ({"tokens": [*BYTES, "12", "123", "ab", "ab", "<|eot_id|>"]}, "1 of its 261 tokens occur twice"),
        ({"merges": ["1 2", "12 4"]}, "merge 1 ('12 4')"),
        ({"merges": ["1 zz"]}, "merge 0 ('1 zz')"),
        ({"merges": ["12"]}, "merge 0 ('12')"),
        ({"merges": [" "]}, "merge 0 (' ')"),
        ({"bos_token_id": 261}, "bos_token_id is 261"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError) as refused:
        Tokenizer.from_metadata(small(**changes))
    assert problem in refused.value.found


@settings(deadline=None)
@given(
    tokens=st.lists(st.text(alphabet="abĠ", max_size=3), max_size=6),
    types=st.lists(st.integers(0, 7), max_size=6),
    merges=st.lists(st.text(alphabet="ab ", max_size=4), max_size=4),
)
def test_random_metadata_gives_a_tokenizer_or_one_error(tokens: list[str], types: list[int], merges: list[str]) -> None:
    metadata = small(tokens=tokens, token_type=types, merges=merges, bos_token_id=0)
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except ModelFileError:
        return
    assert all(0 <= token < len(tokens) for token in tokenizer.encode("ab ba", parse_special=True))
