"""The cuts of every listed pre-tokenizer, against what other programs cut."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import UnsupportedModel
from strata.runtime.tokenizer import Tokenizer
from strata.runtime.tokenizers.pretokenizers import PRE_TOKENIZERS
from tests.runtime.vocabularies import golden, small, small_sentencepiece

CASES = golden("cuts.jsonl")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['pre'][0]}-{case['text']!r}" for case in CASES])
def test_golden_cuts(case: dict[str, Any]) -> None:
    for name in case["pre"]:
        cut = PRE_TOKENIZERS[name].cutter().pre_tokenize_str(case["text"])
        assert [piece for piece, _ in cut] == case["pieces"], name


def test_every_pre_tokenizer_has_golden_cuts() -> None:
    assert {name for case in CASES for name in case["pre"]} == set(PRE_TOKENIZERS)


def test_golden_cuts_tell_every_two_entries_apart() -> None:
    cuts: dict[str, dict[str, list[str]]] = {}
    for case in CASES:
        for name in case["pre"]:
            cuts.setdefault(name, {})[case["text"]] = case["pieces"]
    for one, other in combinations(PRE_TOKENIZERS, 2):
        if PRE_TOKENIZERS[one].cuts != PRE_TOKENIZERS[other].cuts:
            shared = cuts[one].keys() & cuts[other].keys()
            assert any(cuts[one][text] != cuts[other][text] for text in shared), (one, other)


def test_no_two_entries_are_the_same() -> None:
    """Two families may share an entry, but a copy of one would drift away from it."""
    entries = {id(pre): pre for pre in PRE_TOKENIZERS.values()}
    assert len(set(entries.values())) == len(entries)


@given(text=st.text(), name=st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_nothing_is_lost_between_the_pieces(text: str, name: str) -> None:
    assert "".join(piece for piece, _ in PRE_TOKENIZERS[name].cutter().pre_tokenize_str(text)) == text


@pytest.mark.parametrize("name", ["other", "default", "", "QWEN2"])
def test_another_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        Tokenizer.from_metadata(small(pre=name))
    assert repr(name) in refused.value.found
    assert all(known in refused.value.remedy for known in PRE_TOKENIZERS)


def test_it_is_refused_before_the_vocabulary_is_read() -> None:
    for refuse in (Tokenizer.check, Tokenizer.from_metadata):
        with pytest.raises(UnsupportedModel):
            refuse(small(pre="other", tokens=None))
    Tokenizer.check(small(tokens=None))
    Tokenizer.check(small_sentencepiece(tokens=None))
