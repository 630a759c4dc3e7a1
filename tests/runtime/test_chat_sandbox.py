"""What runs in the template's process: golden renderings of published families, and every way a template can fail."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.runtime.chat_sandbox import MAX_STEPS, answer
from tests.runtime.vocabularies import GOLDEN, golden

USER = [{"role": "user", "content": "Hi"}]
CASES = golden("chat.jsonl") + golden("chat_families.jsonl")


def source(model: str) -> str:
    return (GOLDEN / "templates" / f"{model}.jinja").read_text(encoding="utf-8")


def render(template: str, **variables: Any) -> dict[str, str]:
    return answer({"source": template, "variables": {"messages": USER, "tools": None, **variables}})


@pytest.mark.parametrize("case", CASES, ids=[f"{case['model']}-{case['label']}" for case in CASES])
def test_golden(case: dict[str, Any]) -> None:
    rendered = render(
        source(case["model"]),
        messages=case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case["add_generation_prompt"],
        bos_token=case.get("bos_token", ""),
        eos_token=case.get("eos_token", ""),
        **case.get("template_kwargs", {}),
    )
    text = re.sub(r"(?<=Current date: )\d{4}-\d\d-\d\d", "TODAY", rendered["text"])
    assert text == case["expected"]


def test_every_template_has_golden_renderings() -> None:
    assert {case["model"] for case in CASES} == {path.stem for path in (GOLDEN / "templates").glob("*.jinja")}


@pytest.mark.parametrize(
    ("model", "messages", "words"),
    [
        ("qwen3.6", [], "No messages provided."),
        ("qwen3.6", [{"role": "assistant", "content": "Hi"}], "No user query found"),
        ("mixtral", [*USER, *USER], "roles must alternate"),
    ],
)
def test_published_templates_refuse_conversations(model: str, messages: list[Any], words: str) -> None:
    assert words in render(source(model), messages=messages, bos_token="", eos_token="")["refusal"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ x | tojson }}", '{"b": "é<b>&\'", "a": [1, null, true]}'),
        ("{{ x.a | tojson(indent=1) }}", "[\n 1,\n null,\n true\n]"),
        ("{{ x.b | tojson(ensure_ascii=true) }}", '"\\u00e9<b>&\'"'),
        ("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1,null,true],"b":"é<b>&\'"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% macro f(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call f(1) %}hi{% endcall %}", "[1hi]"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # blocks leave no white space behind
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
    ],
)
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template, x={"b": "é<b>&'", "a": [1, None, True]}) == {"text": text}


def test_a_template_may_refuse_the_conversation() -> None:
    assert render("{{ raise_exception('Roles must alternate') }}") == {"refusal": "Roles must alternate"}


def test_compiling_alone_renders_nothing() -> None:
    assert answer({"source": "{{ raise_exception('no') }}"}) == {"text": ""}
    assert "line 1" in answer({"source": "{% if %}"})["problem"]


LOOPS = f"{{% for i in range({MAX_STEPS // 2}) %}}{{% endfor %}}" * 3


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("a\n{% if %}", "line 2"),
        ("{% nonsense %}", "unknown tag"),
        ("{% break %}", "outside loop"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "nested too deeply"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' | nonsense }}", "nonsense"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        (LOOPS, "loop rounds"),
        ("{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}", "macro calls"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{% for i in range(20) %}" + "x" * (1 << 20) + "{% endfor %}", "characters"),
    ],
)
def test_a_broken_template_is_one_problem(template: str, problem: str) -> None:
    assert problem in render(template)["problem"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__.os.popen('id') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.sys }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | map(attribute='__mro__') | list }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends 'x' %}",
    ],
)
def test_nothing_outside_can_be_reached(template: str) -> None:
    answered = render(template)
    assert "text" not in answered or not any(word in answered["text"] for word in ("class", "uid=", "root:", "module"))
    if "problem" in answered:
        assert any(word in answered["problem"] for word in ("unsafe", "loader", "undefined", "no attribute"))


QWEN = source("qwen3")
MARKS = st.sampled_from(
    ["{%", "%}", "{{", "}}", "(", ")", "'", " break ", " endfor ", " endif ", " else ", "|", "messages"]
)


@settings(deadline=None)
@given(start=st.integers(0, len(QWEN)), length=st.integers(0, 60), insert=st.lists(MARKS, max_size=4).map("".join))
def test_a_damaged_template_gives_one_answer(start: int, length: int, insert: str) -> None:
    answered = render(QWEN[:start] + insert + QWEN[start + length :])
    assert len(answered) == 1
    assert json.loads(json.dumps(answered)) == answered
