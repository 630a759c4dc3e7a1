"""A conversation's prompts: thinking on and off, and plain text that goes on."""

from types import SimpleNamespace
from typing import Any

import pytest

from strata.cli.conversation import Conversation
from strata.cli.prompt import Room
from strata.errors import UsageError
from strata.runtime.answer import Content, Reasoning
from tests.runtime.vocabularies import GOLDEN, header, small, small_sentencepiece


def conversation(metadata: dict[str, Any], template: str | None = None, **options: Any) -> Conversation:
    if template is not None:
        source = (GOLDEN / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        metadata = metadata | {"tokenizer.chat_template": source}
    return Conversation(
        SimpleNamespace(metadata=metadata), **({"chat": True, "system": None, "room": Room(4096, 4096)} | options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("think", "end", "parts"),
    [
        (None, "<|im_start|>assistant\n<think>\n", [Reasoning("a")]),
        (True, "<|im_start|>assistant\n<think>\n", [Reasoning("a")]),
        (False, "<|im_start|>assistant\n<think>\n\n</think>\n\n", [Content("a")]),
    ],
)
def test_thinking_is_switched_by_the_template(think: bool | None, end: str, parts: list[Any]) -> None:
    talk = conversation(small(), "qwen3.6", think=think)
    assert talk.tokenizer.decode(talk.ask("Hi")).endswith(end)
    assert talk.parser().push("a") == parts


@pytest.mark.parametrize("think", [True, False])
def test_a_template_without_a_switch_is_said(think: bool) -> None:
    with pytest.raises(UsageError, match=r"no switch for thinking") as refused:
        conversation(small(), "qwen3-2507", think=think)
    assert refused.value.asked == ("use --think" if think else "use --no-think")


def test_plain_text_has_no_thinking_to_switch() -> None:
    with pytest.raises(UsageError, match="--no-chat"):
        conversation(small(), chat=False, think=False)


def test_plain_text_goes_on_with_the_space_of_its_first_token() -> None:
    talk = conversation(small_sentencepiece(), chat=False)
    prompt = talk.ask("ab")
    (answer,) = talk.tokenizer.encode("ab", parse_special=False)
    text = talk.decoder().push(answer)
    assert text == " ab"
    assert talk.parser().push("<think>") == [Content("<think>")]
    talk.answered(text)
    assert talk.ask("") == [*prompt, answer]


def test_a_chat_answer_begins_without_that_space() -> None:
    talk = conversation(header("mixtral"), "mixtral")
    talk.ask("Hi")
    (answer,) = talk.tokenizer.encode("Hello", parse_special=False)
    assert talk.decoder().push(answer) == "Hello"
    talk.answered("Hello")
    assert talk.tokenizer.decode(talk.ask("Again")) == "<s>  [INST] Hi [/INST] Hello</s>  [INST] Again [/INST]"
