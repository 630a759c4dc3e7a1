"""An answer taken apart while it comes: reasoning, what is meant for the reader, and calls of tools.

Qwen's form: reasoning between ``<think>`` marks at the start, calls between ``<tool_call>`` marks after it, written
as JSON (Qwen 2.5 and 3) or as tagged parameters (Qwen3-Coder, 3.5 and 3.6). Other families use the same marks for
reasoning. Line ends next to a mark belong to the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote to think."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes
    ----------
    name : str
    arguments : dict
    text : str
        The call as the model wrote it, marks included.
    """

    name: str
    arguments: dict[str, Any]
    text: str


Part = Reasoning | Content | ToolCall


class AnswerParser:
    """Takes one answer apart. However the text is split into pieces, the parts, texts joined, are the same.

    Nothing is lost: a call that is cut off or cannot be read is given as content, as it was written.

    Parameters
    ----------
    template : str
        The model's chat template. Marks that it does not mention mean nothing; empty for plain text.
    prompt : str
        The rendered prompt. Where it ends with an opened ``<think>``, the answer begins inside the reasoning.
    tools : sequence of mappings, optional
        The functions on offer, as JSON schemas: they say which tagged parameters are other than strings.
    """

    def __init__(self, template: str, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._types = _parameter_types(tools or ())
        self._calls = _CALL in template
        self._held = ""  # text that cannot be told yet
        self._gap = ""  # line ends in front of a call's mark
        self._trim = False  # whether line ends at the start of what is held belong to a mark
        if _THOUGHT not in template:
            self._step: Callable[[], list[Part] | None] = self._content
        elif prompt.rstrip().endswith(_THINK):
            self._go(self._reasoning)
        else:
            self._step = self._start

    def push(self, piece: str) -> list[Part]:
        """Parts that are certain after this piece; often one, none inside a mark or a call."""
        self._held += piece
        parts: list[Part] = []
        while True:
            if self._trim:
                self._held = self._held.lstrip("\n")
                self._trim = not self._held
            new = self._step()
            if new is None:
                return parts
            parts += [part for part in new if isinstance(part, ToolCall) or part.text]

    def finish(self) -> list[Part]:
        """What the end of the answer adds."""
        rest, self._held = self._held, ""
        if self._step == self._reasoning:
            rest = rest.rstrip("\n")
            return [Reasoning(rest)] if rest else []
        rest = self._gap + rest
        return [Content(rest)] if rest else []

    # Each step looks at what is held and returns parts, or None when it needs more text.

    def _start(self) -> list[Part] | None:
        text = self._held.lstrip()
        if text.startswith(_THINK):
            self._held = text[len(_THINK) :]
            self._go(self._reasoning)
            return []
        if _THINK.startswith(text):  # white space alone, or the beginning of the mark
            return None
        self._step = self._content
        return []

    def _reasoning(self) -> list[Part] | None:
        thought, closed = self._take_until(_THOUGHT)
        if closed:
            self._go(self._content)
            return [Reasoning(thought.rstrip("\n"))]
        return [Reasoning(thought)] if thought else None

    def _content(self) -> list[Part] | None:
        if not self._calls:
            text, self._held = self._held, ""
            return [Content(text)] if text else None
        text, opened = self._take_until(_CALL)
        if not opened:
            return [Content(text)] if text else None
        said = text.rstrip("\n")
        self._gap = text[len(said) :]
        self._held = _CALL + self._held
        self._step = self._call
        return [Content(said)]

    def _call(self) -> list[Part] | None:
        end = self._held.find(_CALLED)
        if end < 0:
            return None
        end += len(_CALLED)
        written, self._held = self._held[:end], self._held[end:]
        gap, self._gap = self._gap, ""
        call = _read_call(written, self._types)
        if call is None:
            self._step = self._content
            return [Content(gap + written)]
        self._go(self._content)
        return [call]

    def _go(self, step: Callable[[], list[Part] | None]) -> None:
        self._step = step
        self._trim = True

    def _take_until(self, mark: str) -> tuple[str, bool]:
        """Take the text in front of a mark, and the mark; without one, all that cannot belong to one."""
        before, found, after = self._held.partition(mark)
        if found:
            self._held = after
            return before, True
        begun = next((n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0)
        sure = before[: len(before) - begun].rstrip("\n")
        self._held = before[len(sure) :]
        return sure, False


def _read_call(written: str, types: Mapping[tuple[str, str], str]) -> ToolCall | None:
    """Read one call, marks included; None if it is in neither form."""
    body = written[len(_CALL) : -len(_CALLED)]
    tagged = _FUNCTION.fullmatch(body)
    if tagged:
        name, arguments, rest = tagged[1], {}, tagged[2]
        while rest:
            parameter = _PARAMETER.match(rest)
            if parameter is None:
                return None
            arguments[parameter[1]] = _value(parameter[2], types.get((name, parameter[1]), "string"))
            rest = rest[parameter.end() :]
        return ToolCall(name, arguments, written)
    try:
        call = json.loads(body)
        name, arguments = call["name"], call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return ToolCall(name, arguments, written) if isinstance(name, str) and isinstance(arguments, dict) else None


def _value(text: str, kind: str) -> Any:
    """A tagged parameter's value: text, or what JSON it is where the tool asks for another type."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """JSON type of each (function, parameter) that declares one."""
    types = {}
    for tool in tools:
        function = tool.get("function", tool)
        for name, schema in function.get("parameters", {}).get("properties", {}).items():
            if isinstance(schema, dict) and isinstance(schema.get("type"), str):
                types[function.get("name", ""), name] = schema["type"]
    return types
