"""The report for a terminal, as renderables; whoever has the console prints them.

A status is a word and a symbol, never a colour alone. Colours are mid-tones that read on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from strata.doctor.findings import Finding, Outcome, Report, Status
from strata.doctor.summary import summary

WIDTH = 100  # wider lines are hard to read
NAMED = 4  # checks named in a folded line
PROBLEMS = (Status.CRASHED, Status.FAIL, Status.WARN)
SYMBOLS = {"pass": "✓", "warn": "!", "fail": "✗", "unknown": "?", "skipped": "–", "crashed": "✗"}
ASCII = str.maketrans({"✓": "+", "✗": "x", "–": "-"})  # one for one, so that nothing moves
STYLES = {
    "pass": "bold color(28)",
    "warn": "bold color(166)",
    "fail": "bold color(160)",
    "unknown": "bold color(62)",
    "skipped": "bold",
    "crashed": "bold color(160)",
}
HEADS = {
    Outcome.READY: Status.PASS,
    Outcome.READY_WITH_WARNINGS: Status.WARN,
    Outcome.NOT_READY: Status.FAIL,
    Outcome.UNDETERMINED: Status.UNKNOWN,
}


class TerminalReport:
    """A report as rich renders it: verdict first, then problems, then one line for what is fine, then the machine.

    Parameters
    ----------
    report : Report
        What to show.
    verbose : bool
        Whether to list passed, unknown and skipped checks one by one with their evidence.
    """

    def __init__(self, report: Report, *, verbose: bool = False) -> None:
        self.report = report
        self.verbose = verbose

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        body = console.render(Group(*self._parts()), options.update(width=min(options.max_width, WIDTH)))
        for segment in body:
            yield Segment(_ascii(segment.text), segment.style, segment.control) if options.ascii_only else segment

    def _parts(self) -> Iterator[RenderableType]:
        verdict, findings = self.report.verdict, self.report.findings
        head = HEADS[verdict.outcome]
        yield Text.assemble((f"{SYMBOLS[head]} ", STYLES[head]), (verdict.sentence, "bold"))
        for status in PROBLEMS:
            for finding in findings:
                if finding.status is status:
                    yield Text()
                    yield _finding(finding)
        yield Text()
        for status in (Status.UNKNOWN, Status.PASS, Status.SKIPPED):
            chosen = [f for f in findings if f.status is status]
            if chosen and self.verbose:
                yield from (_finding(finding) for finding in chosen)
                yield Text()
            elif chosen:
                yield _folded(status, chosen)
        yield Text()
        yield _rows([(label, Text(text)) for label, text in summary(self.report.facts)])


def _ascii(text: str) -> str:
    return text.translate(ASCII).encode("ascii", "replace").decode("ascii")


def _finding(finding: Finding) -> RenderableType:
    head = Text.assemble(
        (f"{SYMBOLS[finding.status]} {finding.status.upper()}", STYLES[finding.status]),
        f"  {finding.title}  ",
        f"[{finding.id}]",
    )
    rows = [("", Text(finding.what))]
    seen = [Text(f"{e.text}  ({e.source})") for e in finding.evidence]
    rows += [("seen" if n == 0 else "", text) for n, text in enumerate(seen)]
    if finding.remedy:
        rows.append(("fix", Text(finding.remedy, style="bold")))
    return Group(head, Padding(_rows(rows), (0, 0, 0, 2)))


def _folded(status: Status, findings: list[Finding]) -> Text:
    count = f"{len(findings)} check{'s' if len(findings) > 1 else ''}"
    titles = [f.title for f in findings[:NAMED]] + ([f"{len(findings) - NAMED} more"] if len(findings) > NAMED else [])
    words = {
        Status.PASS: f"{count} passed (-v lists them)",
        Status.UNKNOWN: f"{count} could not tell (-v says why): {', '.join(titles)}",
        Status.SKIPPED: f"{count} not run: {', '.join(dict.fromkeys(f.what.rstrip('.') for f in findings))}",
    }
    return Text.assemble((f"{SYMBOLS[status]} {status.upper()}", STYLES[status]), f"  {words[status]}")


def _rows(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text)
    return table
