"""Prompts from -p and stdin, and the room that they must fit into."""

from __future__ import annotations

import io
import os
import sys

import pytest

from strata.cli import prompt
from strata.cli.prompt import Room, check_prompt, read_prompt, typed_text
from strata.errors import UsageError


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="ascii", errors="surrogateescape")


def test_a_prompt_that_fits_is_let_through() -> None:
    Room(context=64, trained=4096).require(64)


def test_one_that_does_not_is_told_what_would_do() -> None:
    with pytest.raises(UsageError) as refusal:
        Room(context=64, trained=4096).require(100)
    assert refusal.value.found == "it is 100 tokens, and the context is 64"
    assert "--max-context 356 (the model allows 4,096)" in refusal.value.remedy
    with pytest.raises(UsageError, match="--max-context 4096 "):
        Room(context=64, trained=4096).require(4000)
    with pytest.raises(UsageError, match="no --max-context helps") as beyond:
        Room(context=64, trained=4096).require(5000)
    assert "--max-context" not in beyond.value.remedy


@pytest.mark.parametrize("data", ["Bären 🐻".encode(), b"\xef\xbb\xbf" + "Bären 🐻".encode()])
def test_stdin_is_utf_8_whatever_the_locale(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert read_prompt(None) == "Bären 🐻"
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert read_prompt("-") == "Bären 🐻"


@pytest.mark.parametrize(("data", "words"), [(b"caf\xe9", "not UTF-8"), (b" \n", "is empty"), (b"", "is empty")])
def test_stdin_without_a_prompt_is_refused(data: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    with pytest.raises(UsageError, match=words):
        read_prompt(None)


def test_endless_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "_LONGEST_BYTES", 1 << 20)
    monkeypatch.setattr(sys, "stdin", Stdin(b"y\n" * (1 << 20)))
    with pytest.raises(UsageError, match="more than 1 MiB"):
        read_prompt(None)


def test_no_stdin_and_no_prompt_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    check_prompt("Hi", json=True)
    with pytest.raises(UsageError, match="stdin is closed"):
        check_prompt(None, json=False)
    with pytest.raises(UsageError, match="stdin is closed"):
        read_prompt("-")


@pytest.mark.skipif(os.name == "nt", reason="arguments are text there")
def test_typed_bytes_are_utf_8_whatever_the_locale() -> None:
    assert typed_text("-p", None) is None
    assert typed_text("-p", "Bären") == "Bären"
    with pytest.raises(UsageError, match="not UTF-8"):
        typed_text("-p", "caf\udce9")
