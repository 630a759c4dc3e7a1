"""The report as text to paste into an issue."""

from __future__ import annotations

import io
import re

import msgspec
from rich.console import Console

from strata.doctor.findings import Report
from strata.doctor.printable import printable
from strata.doctor.report import TerminalReport

LONGEST = 48_000  # bytes; forges refuse texts beyond 64 KiB
FINDINGS, FACTS, PLAN = 19_000, 15_000, 12_000  # bytes of each section


def to_markdown(report: Report) -> str:
    """Return `report` as Markdown of less than 50 KB: verdict and findings, then facts and plan folded away.

    Nothing that a machine or a model's header says stands outside a code block, where it could call a person or draw
    a picture. Redact the report first.
    """
    parts = [f"### Strata report\n\n{fenced(cut(plain_text(report), FINDINGS), 'text')}\n"]
    for title, value, most in (("Facts", report.facts, FACTS), ("Plan", report.plan, PLAN)):
        if text := _compact(value):
            body = fenced(cut(text, most), "json")
            parts.append(f"<details><summary>{title}</summary>\n\n{body}\n\n</details>\n")
    return cut("\n".join(parts), LONGEST)


def plain_text(report: Report) -> str:
    """Return the terminal report with every check, without colour, 100 columns wide."""
    file = io.StringIO()
    console = Console(file=file, width=100, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(TerminalReport(report, verbose=True))
    return printable(file.getvalue().strip())


def fenced(text: str, kind: str = "") -> str:
    """Return `text` as a code block that nothing inside it can end.

    Its fence is longer than any in the text, and of tildes: a form may put the whole report into a block of
    backticks, which it must not end either, so a run of three of those in the text becomes quotation marks.
    """
    text = re.sub(r"`{3,}", lambda run: "'" * len(run[0]), text)
    longest = max((len(run) for run in re.findall(r"~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}"


def cut(text: str, most: int) -> str:
    """Return at most `most` bytes of `text`, whole lines from its start and its end, and what was left out between."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return data.decode()
    half = (most - 60) // 2
    head = data[:half].decode("utf-8", "ignore")
    tail = data[-half:].decode("utf-8", "ignore")
    head = head[: head.rfind("\n") + 1] or head
    tail = tail[tail.find("\n") + 1 :] or tail
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}[... {left_out:,} bytes left out ...]\n{tail}"


def _compact(value: msgspec.Struct | None) -> str:
    """Return the JSON of `value` without what is not known, one line for each of its parts."""
    if value is None:
        return ""
    parts = msgspec.to_builtins(value)
    lines = (f"{msgspec.json.encode(k).decode()}: {msgspec.json.encode(_known(v)).decode()}" for k, v in parts.items())
    return "{" + ",\n".join(lines) + "}"


def _known(value: object) -> object:
    if isinstance(value, dict):
        return {k: _known(v) for k, v in value.items() if v not in (None, {}, [], ())}
    return [_known(v) for v in value] if isinstance(value, (list, tuple)) else value
