"""Chat templates in their own process: what comes back, and that neither time nor memory is without bounds."""

import os
import signal
from typing import Any

import pytest

from strata.errors import ModelFileError, Undetermined, UsageError
from strata.runtime import chat
from strata.runtime.chat import ChatTemplate
from tests.runtime.vocabularies import GOLDEN, golden

USER = [{"role": "user", "content": "Hi"}]


def template(model: str) -> str:
    return (GOLDEN / "templates" / f"{model}.jinja").read_text(encoding="utf-8")


def test_a_golden_rendering_comes_through_the_process() -> None:
    case = next(case for case in golden("chat_families.jsonl") if case["label"] == "two tool calls")
    rendered = ChatTemplate(template(case["model"])).render(
        case["messages"], tools=case["tools"], add_generation_prompt=case["add_generation_prompt"]
    )
    assert rendered == case["expected"]


def test_tokens_and_variables_are_given() -> None:
    made = ChatTemplate(
        "{{ bos_token }}{{ x }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token="</s>"
    )
    assert made.render([{"role": "user", "content": "é🦔"}], variables={"x": "|"}) == "<s>|é🦔</s>"


def test_a_file_without_a_template_says_no_chat() -> None:
    with pytest.raises(UsageError, match="--no-chat"):
        ChatTemplate.from_metadata({})


def test_from_metadata() -> None:
    made = ChatTemplate.from_metadata({"tokenizer.chat_template": "{{ bos_token }}!"}, bos_token="<s>")
    assert made.render(USER) == "<s>!"
    with pytest.raises(ModelFileError, match="not a string"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 7})


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(ModelFileError, match="line 2") as refused:
        ChatTemplate("a\n{% if %}")
    assert "--no-chat" in refused.value.remedy


def test_a_template_may_refuse_the_conversation() -> None:
    with pytest.raises(UsageError, match="Roles must alternate"):
        ChatTemplate("{{ raise_exception('Roles must alternate.') }}").render(USER)


@pytest.mark.parametrize(
    ("model", "switches"),
    [("qwen3", {"enable_thinking"}), ("qwen3.6", {"enable_thinking"}), ("glm-4.5", {"enable_thinking"})],
)
def test_the_switch_for_thinking_is_found(model: str, switches: set[str]) -> None:
    made = ChatTemplate(template(model))
    assert made.thinking(False) == dict.fromkeys(switches, False)
    assert made.render(USER, variables=made.thinking(False)) != made.render(USER, variables=made.thinking(True))


@pytest.mark.parametrize("model", ["smollm2", "mixtral", "qwen3-2507"])
def test_a_template_without_the_switch_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="no switch for thinking"):
        ChatTemplate(template(model)).thinking(True)


# Two structures that share their parts: comparing them takes 2^60 steps in one operation that nothing can interrupt.
ENDLESS = (
    "{% set ns = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
)


def test_one_endless_operation_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate(ENDLESS)
    monkeypatch.setattr(chat, "MAX_SECONDS", 1.0)
    with pytest.raises(ModelFileError, match="does not end within 1 seconds"):
        made.render(USER)


HUNGRY = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ ('a' * 10 ** 7).replace('a', 'b' * 10 ** 7) | length }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
]


@pytest.mark.parametrize("source", HUNGRY)
def test_a_template_that_takes_memory_is_stopped(source: str) -> None:
    with pytest.raises(ModelFileError, match="takes more memory"):
        ChatTemplate(source).render(USER)


def test_memory_is_watched_where_the_system_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told a limit beyond reach, the process is like one on a system that has no such limit."""
    given: list[dict[str, Any]] = []
    dumps = chat.json.dumps

    def without_limit(request: dict[str, Any]) -> str:
        given.append(request)
        return dumps({**request, "memory_bytes": 1 << 40})

    monkeypatch.setattr(chat.json, "dumps", without_limit)
    monkeypatch.setattr(chat, "MAX_MEMORY", 100 << 20)
    with pytest.raises(ModelFileError, match="more memory"):
        # Built up over seconds: at most 100 MiB more than the limit are ever taken.
        ChatTemplate(
            "{% set ns = namespace(x=[]) %}{% for i in range(2000) %}{% set ns.x = ns.x + [('x' ~ i) * 100000] %}"
            "{% endfor %}" + ENDLESS
        ).render(USER)
    assert given


def test_a_process_that_dies_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate("x")
    monkeypatch.setattr(chat, "_wait", _killing(chat._wait))
    with pytest.raises(ModelFileError, match=r"ended with code -9: it said nothing"):
        made.render(USER)


def _killing(wait: Any) -> Any:
    def kill_first(process: Any) -> Any:
        os.kill(process.pid, signal.SIGKILL)
        return wait(process)

    return kill_first


def test_a_process_that_cannot_be_started_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChatTemplate("x")
    monkeypatch.setattr(chat.sys, "executable", "/nowhere/python")
    with pytest.raises(Undetermined, match="no process could be started"):
        made.render(USER)


def test_ctrl_c_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    made = ChatTemplate("x")

    def interrupted(process: Any) -> Any:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.render(USER)
    assert started[0].poll() is not None
