"""What a header says of a vocabulary: special ids, and every contradiction one clear error."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelFileError
from strata.runtime.tokenizer import Tokenizer
from tests.runtime.vocabularies import BYTES, small


def test_end_tokens_from_keys_and_from_names() -> None:
    tokenizer = Tokenizer.from_metadata(small(eos_token_id=3, eot_token_id=4, eom_token_id=5))
    assert tokenizer.eos_ids == {3, 4, 5, len(tokenizer) - 1}


def test_a_file_without_types_has_normal_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(small(token_type=None))
    assert tokenizer.encode("<|begin|>", parse_special=True) == tokenizer.encode("<|begin|>", parse_special=False)


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
