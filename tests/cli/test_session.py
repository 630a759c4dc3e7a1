"""A session with an engine that says what the test wants: reasoning, answer and calls are told apart."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from strata.cli.conversation import Conversation
from strata.cli.prompt import Room
from strata.cli.session import Session
from strata.doctor.plan import DeviceRef
from strata.errors import ExitCode
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
    prefill_misses=0,
    evictions=0,
    filled_bytes={},
)


class Numbers(msgspec.Struct):
    """What a session reads of a plan, of a memory report and of how loading went."""

    context: int = 64
    planned_bytes: int = 1
    actual_bytes: int = 1
    peak_bytes: int = 1
    difference_bytes: int = 0
    vram_taken_bytes: int | None = None
    tiers: tuple[None, ...] = ()
    kernels: int = 0
    device: Any = msgspec.field(default_factory=lambda: DeviceRef(backend="numpy", id="cpu", name="CPU"))


class Scripted:
    """An engine whose answer is known."""

    plan = loading = Numbers()

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
    conversation = Conversation(file, chat=True, system=None, room=Room(4096, 4096))
    engine = Scripted(conversation, answer)
    log: Any = SimpleNamespace(event=lambda *args, **values: None, path=None)
    made: Any = Session
    expect = lambda stats: ((1.0, 2.0), (1.0, 2.0))  # noqa: E731
    return made(engine, conversation, None, log, seed=7, max_tokens=None, expect=expect), conversation


def test_reasoning_goes_to_stderr_and_the_answer_alone_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    talk, conversation = session("<think>\nTwo and two.\n</think>\n\nFour é🦔.")
    assert talk.answer_once(conversation.ask("2+2?"), json=False) is ExitCode.OK
    said = capsys.readouterr()
    assert said.out == "Four é🦔.\n"
    assert "Two and two.\n\n\nprompt 1 tokens at 1.0/s (expected 1.0 to 2.0)" in said.err


def test_json_tells_reasoning_answer_and_calls_apart(capsys: pytest.CaptureFixture[str]) -> None:
    talk, conversation = session(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    assert talk.answer_once(conversation.ask("Weather?"), json=True) is ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reasoning"]) == ("I look.", "Hm.")
    assert document["tool_calls"] == [{"name": "look", "arguments": {"city": "Köln"}}]


def test_what_was_thought_and_called_is_told_to_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    talk, conversation = session(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    assert talk.answer_once(conversation.ask("Weather?"), json=False) is ExitCode.OK
    assert f"I look.\n{CALL}<|im_end|>" in conversation.tokenizer.decode(conversation.ask("And?"))
    assert capsys.readouterr().out == f"I look.\n{CALL}\n"
