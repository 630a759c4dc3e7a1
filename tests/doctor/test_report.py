"""What a person reads: verdict first, 80 columns, no colour needed, no Unicode needed."""

import io
import re

import jsonschema
import msgspec
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from strata.doctor.catalogue import check_list, check_page
from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.diagnose import diagnose
from strata.doctor.explain import NOT_KNOWN, explain
from strata.doctor.explain_view import explanations_view
from strata.doctor.findings import Report, report_schema
from strata.doctor.markdown import LONGEST, cut, fenced, to_markdown
from strata.doctor.report import TerminalReport
from strata.errors import UsageError
from tests.doctor.machines import cases


def report_of(name: str) -> Report:
    machine = cases()[name].machine()
    return diagnose(machine.facts, model=machine.model, plan=machine.plan, options=machine.options)


def shown(renderable: object, *, width: int = 80, encoding: str = "utf-8", **options: object) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=file, width=width, **options).print(renderable)  # type: ignore[arg-type]
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("verbose", [False, True])
def test_every_machine_fits_80_columns(name: str, verbose: bool) -> None:
    text = shown(TerminalReport(report_of(name), verbose=verbose))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]


def test_the_first_line_is_the_verdict_and_problems_come_before_the_rest() -> None:
    text = shown(TerminalReport(report_of("seed-000-broken-context")))
    assert text.startswith("✗ Not ready: CUDA runtime 12.4")
    order = [text.index(part) for part in ("✗ FAIL", "STR-CTX-BROKEN", "fix", "? UNKNOWN", "✓ PASS", "System")]
    assert order == sorted(order)


def test_a_status_is_a_word_not_only_a_colour() -> None:
    report = report_of("cluster-exclusive-busy")
    plain = shown(TerminalReport(report))
    coloured = shown(TerminalReport(report), force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    for word in ("FAIL", "WARN", "UNKNOWN", "PASS"):
        assert word in plain


def test_no_colour_when_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(TerminalReport(report_of("two-cupys")), force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-9])[;m]", text)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_without_unicode(encoding: str) -> None:
    text = shown(TerminalReport(report_of("seed-000-broken-context"), verbose=True), encoding=encoding)
    assert text.isascii()
    assert text.startswith("x Not ready")
    assert "+ PASS" in text


def test_verbose_lists_what_is_fine() -> None:
    report = report_of("h200-server")
    short, long = (shown(TerminalReport(report, verbose=v)) for v in (False, True))
    assert "STR-CUDA-KERNEL" not in short
    assert "STR-CUDA-KERNEL" in long
    assert len(short.splitlines()) < 25


def test_markup_in_facts_is_shown_as_it_is() -> None:
    case = cases()["desktop-on-3090"]
    name = "[red]RTX[/red] `3090`"
    report = diagnose(case.machine({"nvml.value.gpus.0.name": name}).facts)
    assert name in " ".join(shown(TerminalReport(report), width=200).split())


def test_endless_evidence_is_shown_by_its_ends() -> None:
    log = ["NVRM: Xid (PCI:0000:01:00): 48, begin " + "x" * 5000 + " end"]
    report = diagnose(cases()["illegal-access"].machine({"host.value.kernel_log": log}).facts)
    text = " ".join(shown(TerminalReport(report)).split())
    assert re.search(r"48, begin x[x ]+ \[\.\.\.\] x[x ]+ end", text)
    assert len(text) < 4000
    assert any(log[0] in e.text for f in report.findings for e in f.evidence)


def test_json_matches_the_published_schema() -> None:
    schema = report_schema()
    validator = jsonschema.Draft202012Validator(schema)
    for name in cases():
        report = report_of(name)
        data = msgspec.json.encode(report)
        validator.validate(msgspec.json.decode(data))
        assert msgspec.json.decode(data, type=Report) == report
        assert msgspec.json.decode(data)["schema_version"] == 1


@pytest.mark.parametrize("name", cases())
def test_markdown_is_short_enough_for_an_issue(name: str) -> None:
    text = to_markdown(report_of(name))
    assert len(text.encode()) < 50_000
    lines = text.splitlines()
    assert lines[:3] == ["### Strata report", "", "~~~text"]
    first, *wrapped = " ".join(lines[3 : lines.index("", 3)]).split()
    assert " ".join(wrapped) == " ".join(report_of(name).verdict.sentence.split())
    assert len(first) == 1  # the symbol
    assert text.count("\n~~~") % 2 == 0
    assert text.count("<details>") == text.count("</details>") > 0
    assert "```" not in text


@pytest.mark.parametrize("name", ["seed-000-broken-context", "wsl2-embedding-pageable"])
def test_a_forge_shows_the_report_as_it_is_meant(name: str) -> None:
    text = to_markdown(report_of(name))
    blocks = [token for token in MarkdownIt().parse(text) if token.level == 0 and token.nesting >= 0]
    parts = 2 if report_of(name).plan else 1  # facts, and the plan
    assert [block.type for block in blocks] == ["heading_open", "fence", *["html_block", "fence", "html_block"] * parts]
    (whole,) = MarkdownIt().parse(f"```text\n{text}\n```")  # what a form with `render: text` makes of it
    assert whole.content.rstrip("\n") == text.rstrip("\n")


def test_nothing_of_a_machine_stands_outside_a_code_block() -> None:
    evil = "~~~\n</details><img src=x> @someone #1 ```\n# heading"
    machine = cases()["32gib-for-80gib-model"].machine({"model.name": evil, "host.value.os_release": evil})
    text = to_markdown(diagnose(machine.facts, model=machine.model, plan=machine.plan))
    outside, fence = [], ""
    for line in text.splitlines():
        run = re.match(r"~{3,}", line)
        if run and not fence:
            fence = run[0]
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert fence == ""
    assert "someone" in text
    allowed = {"", "### Strata report", "</details>"} | {f"<details><summary>{t}</summary>" for t in ("Facts", "Plan")}
    assert set(outside) <= allowed


def test_markdown_stays_short_when_a_fact_is_endless() -> None:
    lines = [f"NVRM: Xid {n} " + "x" * 300 for n in range(2000)]
    machine = cases()["illegal-access"].machine({"host.value.kernel_log": lines})
    text = to_markdown(diagnose(machine.facts))
    assert len(text.encode()) <= LONGEST
    assert "bytes left out" in text


@pytest.mark.parametrize("text", ["plain", "```\n# not a heading", "~~~\n# nor this", "a ~~~~~ b", "``` ```` ~~~"])
def test_nothing_ends_a_code_block_early(text: str) -> None:
    block = fenced(text, "text")
    fence = block.split("text", 1)[0]
    assert set(fence) == {"~"}
    assert fence not in text
    assert "```" not in block  # a form may put all of it into a block of its own
    assert block.endswith(f"\n{fence}")


def test_cut_keeps_whole_lines_of_both_ends() -> None:
    text = "\n".join(f"line {n} ü" for n in range(1000))
    short = cut(text, 1000)
    assert len(short.encode()) <= 1000
    assert short.startswith("line 0 ü\n")
    assert short.endswith("\nline 999 ü")
    assert re.search(r"\n\[\.\.\. [\d,]+ bytes left out \.\.\.\]\nline ", short)
    assert cut("short", 1000) == "short"


def test_catalogue_pages() -> None:
    listed = shown(check_list())
    assert all(id in listed for id in CATALOGUE)
    page = shown(check_page("str-wsl-pin"))
    assert not [line for line in (listed + page).splitlines() if line != line.rstrip()]
    assert page.startswith("Page-locked budget of WSL2  [STR-WSL-PIN]")
    assert "pinned.granted_bytes" in page
    with pytest.raises(UsageError, match="--list-checks"):
        check_page("STR-NO-SUCH")


def test_explanations() -> None:
    text = shown(explanations_view(explain("native head upload: out of memory")))
    for part in ("Output head refused", "line 1", "cause", "fix", "strata doctor --explain STR-PIN-COUPLED"):
        assert part in text
    assert " ".join(shown(explanations_view(explain("hello"))).split()) == NOT_KNOWN
