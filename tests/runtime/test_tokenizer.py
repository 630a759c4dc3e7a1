"""The tokenizer: golden ids and pieces of published vocabularies, BOS and EOS, and metadata that lies."""

import time
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelFileError, UnsupportedModel, UsageError
from strata.runtime.tokenizer import StreamDecoder, Tokenizer
from tests.runtime.vocabularies import TRIMMED, golden, header, published, small


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


@pytest.mark.bench
def test_building_time() -> None:
    for model in ("qwen3", "mixtral"):
        metadata = header(model)
        start = time.perf_counter()
        tokenizer = Tokenizer.from_metadata(metadata)
        print(f"{model}, {len(tokenizer):,} tokens: built in {time.perf_counter() - start:.3f} s")


def test_no_bos_without_an_id() -> None:
    tokenizer = Tokenizer.from_metadata(small(bos_token_id=None, add_bos_token=True))
    assert not tokenizer.adds_bos
    assert tokenizer.bos_token == ""


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
