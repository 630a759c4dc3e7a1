"""What a person asks: from -p or stdin, checked before anything is loaded for it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.cli.output import say
from strata.errors import UsageError

if TYPE_CHECKING:
    from strata.doctor.plan import AllocationPlan
    from strata.gguf.model_facts import ModelFacts

_ASKED = "answer a prompt"
_EXAMPLE = 'Give one: -p "What is the capital of France?"'
_LONGEST_BYTES = 16 << 20  # of stdin; far beyond any context
_ANSWER_TOKENS = 256  # of room that a larger context is proposed with


@dataclass(frozen=True)
class Room:
    """What a sequence must fit into: the plan's context, and the length that the model was made for."""

    context: int
    trained: int

    def require(self, tokens: int) -> None:
        """Refuse a sequence that is longer than the context.

        Raises
        ------
        UsageError
            With the counts, and the --max-context that would do, if one does.
        """
        if tokens <= self.context:
            return
        found = f"it is {tokens:,} tokens, and the context is {self.context:,}"
        if tokens >= self.trained:
            found += f"; the model was made for {self.trained:,} at most, so that no --max-context helps"
            raise UsageError(_ASKED, found, "Shorten the prompt")
        enough = min(tokens + _ANSWER_TOKENS, self.trained)
        raise UsageError(
            _ASKED, found, f"Shorten it, or use --max-context {enough} (the model allows {self.trained:,})"
        )


def room(plan: AllocationPlan, model: ModelFacts) -> Room:
    """Return the room that a plan leaves for a sequence."""
    return Room(plan.context, model.context_length)


def check_prompt(prompt: str | None, *, json: bool) -> None:
    """Refuse what can be refused without reading stdin.

    Raises
    ------
    UsageError
        An empty prompt, or none where there must be one.
    """
    if prompt is not None:
        _require_something(prompt)
    elif sys.stdin is None:
        raise UsageError(_ASKED, "there is none, and stdin is closed", _EXAMPLE)
    elif json and sys.stdin.isatty():
        raise UsageError("run --json", "a chat has no one JSON document", "Give a prompt with -p, or text on stdin")


def read_prompt(prompt: str | None) -> str | None:
    """Return the prompt of -p or stdin, or None when a person sits at the terminal.

    Raises
    ------
    UsageError
        Stdin holds no text, or far too much.
    """
    if prompt not in (None, "-"):
        return prompt
    if sys.stdin is None:
        raise UsageError(_ASKED, "stdin is closed", _EXAMPLE)
    if sys.stdin.isatty():
        if prompt is None:
            return None
        say("Type the prompt; Ctrl-D on a line of its own ends it.")
    data = sys.stdin.buffer.read(_LONGEST_BYTES + 1)
    if len(data) > _LONGEST_BYTES:
        raise UsageError(_ASKED, f"stdin holds more than {_LONGEST_BYTES >> 20} MiB", "Give a shorter text")
    try:
        text = data.decode("utf-8-sig")  # whatever the locale; Windows' own tools begin with a byte-order mark
    except UnicodeDecodeError as error:
        raise UsageError(
            "read the prompt from stdin", f"it is not UTF-8 ({error.reason} at byte {error.start})", "Give UTF-8 text"
        ) from None
    _require_something(text)
    return text


def _require_something(text: str) -> None:
    if not text.strip():
        raise UsageError(_ASKED, "the prompt is empty", _EXAMPLE)


def typed_text(option: str, text: str | None) -> str | None:
    """Return the text of an option as the person typed it, whatever encoding the locale names.

    Raises
    ------
    UsageError
        Its bytes are no UTF-8.
    """
    if text is None:
        return None
    try:
        return os.fsencode(text).decode() if any("\udc80" <= c <= "\udcff" for c in text) else text
    except UnicodeDecodeError:
        raise UsageError(f"use {option}", "its text is not UTF-8", "Give UTF-8 text") from None
