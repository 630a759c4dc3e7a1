"""Answers taken apart: the same parts wherever the stream is split, and nothing lost."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.runtime.answer import AnswerParser, Content, Part, Reasoning, ToolCall
from tests.runtime.vocabularies import GOLDEN

QWEN3 = (GOLDEN / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
QWEN36 = (GOLDEN / "templates" / "qwen3.6.jinja").read_text(encoding="utf-8")
SMOLLM = (GOLDEN / "templates" / "smollm2.jinja").read_text(encoding="utf-8")

JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
TAGGED_CALL = (
    "<tool_call>\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
BAD_CALL = "<tool_call>\n{nothing}\n</tool_call>"


def parse(pieces: list[str], template: str = QWEN3, prompt: str = "", tools: Any = None) -> list[Part]:
    """Parts of an answer, neighbours of one kind joined."""
    parser = AnswerParser(template, prompt, tools)
    joined: list[Part] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish():
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined


CASES: dict[str, tuple[str, list[Part]]] = {
    "plain": ("Four.\n\nYes.\n", [Content("Four.\n\nYes.\n")]),
    "reasoning": ("<think>\n2+2\n\nis 4\n</think>\n\nFour.", [Reasoning("2+2\n\nis 4"), Content("Four.")]),
    "white space in front": (" \n<think>a</think>b", [Reasoning("a"), Content("b")]),
    "empty reasoning": ("<think>\n\n</think>\n\nHi", [Content("Hi")]),
    "reasoning cut off": ("<think>\nhm\n</thi", [Reasoning("hm\n</thi")]),
    "only reasoning": ("<think>\nhm\n", [Reasoning("hm")]),
    "less than": ("a < b <think> c </think> d <", [Content("a < b <think> c </think> d <")]),
    "a call": (JSON_CALL, [ToolCall("look", {"city": "Köln", "days": 2}, JSON_CALL)]),
    "text, calls, text": (
        f"Looking.\n{JSON_CALL}\n{JSON_CALL}\n\nDone.",
        [Content("Looking."), *[ToolCall("look", {"city": "Köln", "days": 2}, JSON_CALL)] * 2, Content("Done.")],
    ),
    "all three": (
        f"<think>\nhm\n</think>\n\nSo:\n\n{JSON_CALL}",
        [Reasoning("hm"), Content("So:"), ToolCall("look", {"city": "Köln", "days": 2}, JSON_CALL)],
    ),
    "a call while thinking": (f"<think>{JSON_CALL}</think>ok", [Reasoning(JSON_CALL), Content("ok")]),
    "a tagged call": (TAGGED_CALL, [ToolCall("look", {"city": "Köln", "days": "2"}, TAGGED_CALL)]),
    "a call that is none": (f"So:\n{BAD_CALL}\nyes", [Content(f"So:\n{BAD_CALL}\nyes")]),
    "a call cut off": ("So:\n<tool_call>\n{", [Content("So:\n<tool_call>\n{")]),
    "half a mark at the end": ("So:\n<tool_c", [Content("So:\n<tool_c")]),
    "a mark begun twice": ("<<tool_<tool_call>x", [Content("<<tool_<tool_call>x")]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_wherever_the_stream_is_split(name: str) -> None:
    text, parts = CASES[name]
    assert parse([text]) == parts
    assert parse(list(text)) == parts
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]]) == parts, at
        for later in range(at, min(at + 15, len(text) + 1)):
            assert parse([text[:at], text[at:later], text[later:]]) == parts, (at, later)


PIECES = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "<", "{}", JSON_CALL])


@given(pieces=st.lists(PIECES, max_size=12), opened=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_text_gives_the_same_parts_split_anyhow(pieces: list[str], opened: bool, cuts: list[int]) -> None:
    text, prompt = "".join(pieces), "<think>\n" if opened else ""
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in pairwise(ends)], prompt=prompt) == parse([text], prompt=prompt)


@given(text=st.text(alphabet="ab\n<think>/", max_size=40))
def test_nothing_but_marks_and_line_ends_is_left_out(text: str) -> None:
    kept = "".join(part.text for part in parse([text])).replace("\n", "")
    assert kept in (text.replace("\n", ""), text.replace("\n", "").replace("<think>", "", 1).replace("</think>", "", 1))


def test_a_prompt_that_opened_the_reasoning() -> None:
    assert parse(["hm\n</think>\n\nYes"], QWEN36, "<|im_start|>assistant\n<think>\n") == [
        Reasoning("hm"),
        Content("Yes"),
    ]
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parse(["Yes"], QWEN36, closed) == [Content("Yes")]


def test_marks_that_the_template_does_not_know_are_text() -> None:
    text = f"<think>\nhm\n</think>\n{JSON_CALL}"
    assert parse([text], SMOLLM) == [Content(text)]


def test_text_is_shown_as_soon_as_it_cannot_be_a_mark() -> None:
    parser = AnswerParser(QWEN3)
    assert parser.push("Hel") == [Content("Hel")]
    assert parser.push("lo\n<") == [Content("lo")]
    assert parser.push("b>") == [Content("\n<b>")]


def test_a_tool_says_what_its_parameters_are() -> None:
    for tools in ([TOOL], [TOOL["function"]]):
        (call,) = parse([TAGGED_CALL], QWEN36, tools=tools)
        assert isinstance(call, ToolCall)
        assert call.arguments == {"city": "Köln", "days": 2}
    (call,) = parse([TAGGED_CALL.replace("\n2\n", "\nmany\n")], QWEN36, tools=[TOOL])
    assert isinstance(call, ToolCall)
    assert call.arguments["days"] == "many"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"name": 1, "arguments": {}}',
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": [1]}',
        "[" * 100_000,
        "<function=f>",
        "<function=f>x</function>",
        "<function=f><parameter=a>1</function>",
        "<function=></function>",
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert parse([text]) == [Content(text)]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ("<function=f></function>", {}),
        ("<function=f>\n<parameter=a>\n x\n\ny\n</parameter>\n</function>", {"a": " x\n\ny"}),
        ("<function=f><parameter=a></parameter></function>", {"a": ""}),
    ],
)
def test_forms_of_a_call(body: str, arguments: dict[str, Any]) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert parse([text]) == [ToolCall("f", arguments, text)]
