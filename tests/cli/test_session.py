"""A session with an engine that says what the test wants: reasoning, answer and calls are told apart."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from strata.cli.conversation import Conversation
from strata.cli.session import Session
from strata.runtime.generation import GenerationStats, StopReason
from tests.runtime.vocabularies import GOLDEN, small

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln"}}\n</tool_call>'
STATS = GenerationStats(
    reused_tokens=0,
    prefill_tokens=1,
    prefill_s=1.0,
    generated_tokens=1,
    decode_tokens=0,
    decode_s=0.0,
    stop=StopReason.STOP,
    hit_rate=None,
    hits=0,
    misses=0,
    evictions=0,
    filled_bytes={},
)


class Numbers(msgspec.Struct):
    """What a session reads of a plan and of a memory report."""

    context: int = 64
    planned_bytes: int = 1
    peak_bytes: int = 1
    difference_bytes: int = 0


class Scripted:
    """An engine whose answer is known."""

    plan = Numbers()

    def __init__(self, conversation: Conversation, answer: str) -> None:
        self.tokens = conversation.tokenizer.encode(answer, parse_special=True)

    def generate(self, tokens: list[int], *args: Any, **options: Any) -> "Tokens":
        return Tokens(self.tokens)

    def memory_report(self) -> Numbers:
        return Numbers()


class Tokens:
    """A generation."""

    stats = STATS

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def __next__(self) -> int:
        return next(self._tokens)

    def close(self) -> None:
        pass


def session(answer: str) -> tuple[Session, Conversation]:
    source = (GOLDEN / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
    file: Any = SimpleNamespace(metadata=small() | {"tokenizer.chat_template": source})
    conversation = Conversation(file, chat=True, system=None)
    engine = Scripted(conversation, answer)
    log: Any = SimpleNamespace(event=lambda *args, **values: None, path=None)
    return Session(engine, conversation, None, log, seed=7, max_tokens=None), conversation  # type: ignore[arg-type]


def test_reasoning_goes_to_stderr_and_the_answer_alone_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = session("<think>\nTwo and two.\n</think>\n\nFour é🦔.")
    with pytest.raises(typer.Exit):
        talk.answer_once("2+2?", json=False)
    said = capsys.readouterr()
    assert said.out == "Four é🦔.\n"
    assert said.err.startswith("Two and two.\n\n\nprompt 1 tokens")


def test_json_tells_reasoning_answer_and_calls_apart(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = session(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    with pytest.raises(typer.Exit):
        talk.answer_once("Weather?", json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reasoning"]) == ("I look.", "Hm.")
    assert document["tool_calls"] == [{"name": "look", "arguments": {"city": "Köln"}}]


def test_what_was_thought_and_called_is_told_to_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    talk, conversation = session(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    with pytest.raises(typer.Exit):
        talk.answer_once("Weather?", json=False)
    assert f"I look.\n{CALL}<|im_end|>" in conversation.tokenizer.decode(conversation.ask("And?"))
    assert capsys.readouterr().out == f"I look.\n{CALL}\n"
