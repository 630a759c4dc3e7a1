"""Chat templates: the golden renderings, and every way a template can go wrong."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelFileError, StrataError, UsageError
from strata.runtime.chat import ChatTemplate

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
CASES = [json.loads(line) for line in (GOLDEN / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
USER = [{"role": "user", "content": "Hi"}]


def template(model: str) -> ChatTemplate:
    return ChatTemplate((GOLDEN / "templates" / f"{model}.jinja").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=[f"{case['model']}-{case['label']}" for case in CASES])
def test_golden(case: dict[str, Any]) -> None:
    rendered = template(case["model"]).render(
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case["add_generation_prompt"],
        variables=case.get("template_kwargs"),
    )
    assert rendered == case["expected"]


def test_variables_and_functions_that_templates_use() -> None:
    source = (
        "{{ bos_token }}|{{ eos_token }}|{{ strftime_now('%Y') | length }}|{{ messages | tojson }}|"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    )
    chat = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    messages = [{"role": "user", "content": "é<b>"}]
    assert chat.render(messages) == '<s>|</s>|4|[{"role": "user", "content": "é<b>"}]|13'
    assert ChatTemplate("{{ messages | tojson(indent=1) }}").render([]) == "[]"


def test_macros_and_calls_work_under_the_step_counter() -> None:
    source = "{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f(1) %}hi{% endcall %}"
    assert ChatTemplate(source).render(USER) == "[1hi]"


def test_a_file_without_a_template_says_no_chat() -> None:
    with pytest.raises(UsageError, match="--no-chat"):
        ChatTemplate.from_metadata({})


def test_from_metadata() -> None:
    chat = ChatTemplate.from_metadata({"tokenizer.chat_template": "{{ bos_token }}!"}, bos_token="<s>")
    assert chat.render(USER) == "<s>!"
    with pytest.raises(ModelFileError, match="not a string"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 7})


def test_a_template_may_refuse_the_conversation() -> None:
    with pytest.raises(UsageError, match="Roles must alternate"):
        ChatTemplate("{{ raise_exception('Roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a\n{% if %}", "line 2"),
        ("{% nonsense %}", "unknown tag"),
        ("{% break %}", "outside loop"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "nested too deeply"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' | nonsense }}", "nonsense"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "loop rounds"),
        ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}", "macro calls"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(20) %}" + "x" * (1 << 20) + "{% endfor %}", "characters"),
    ],
)
def test_a_broken_template_is_one_clear_error(source: str, problem: str) -> None:
    with pytest.raises(ModelFileError) as failed:
        ChatTemplate(source).render(USER)
    assert problem in failed.value.found
    assert "--no-chat" in failed.value.remedy


def test_a_rendering_starts_with_fresh_bounds() -> None:
    chat = ChatTemplate("{% for i in range(60000) %}{% endfor %}ok")
    assert [chat.render(USER), chat.render(USER)] == ["ok", "ok"]


QWEN = (GOLDEN / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
MARKS = st.sampled_from(
    ["{%", "%}", "{{", "}}", "(", ")", "'", " break ", " endfor ", " endif ", " else ", "|", "messages"]
)


@settings(deadline=None)
@given(start=st.integers(0, len(QWEN)), length=st.integers(0, 60), insert=st.lists(MARKS, max_size=4).map("".join))
def test_nothing_but_strata_errors_comes_out_of_a_damaged_template(start: int, length: int, insert: str) -> None:
    with contextlib.suppress(StrataError):
        assert isinstance(ChatTemplate(QWEN[:start] + insert + QWEN[start + length :]).render(USER), str)
