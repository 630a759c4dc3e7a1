"""The report for a terminal, as renderables; whoever has the console prints them.

A status is a word and a symbol, never a colour alone. Colours are mid-tones that read on light and on dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from strata.doctor.findings import Finding, Outcome, Report, Status
from strata.doctor.summary import summary
from strata.doctor.units import counted

WIDTH = 100  # wider lines are hard to read
LONGEST = 500  # signs of one piece of evidence
NAMED = 4  # checks named in a folded line
PROBLEMS = (Status.CRASHED, Status.FAIL, Status.WARN)
SYMBOLS = {"pass": "✓", "warn": "!", "fail": "✗", "unknown": "?", "skipped": "–", "crashed": "✗"}
ASCII = str.maketrans({"✓": "+", "✗": "x", "–": "-"})  # one for one, so that nothing moves
STYLES = {
    "pass": "bold color(28)",
    "warn": "bold color(166)",
    "fail": "bold color(196)",
    "unknown": "bold color(62)",
    "skipped": "bold",
    "crashed": "bold color(196)",
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
    brief : bool
        Whether to end after the problems, as before a run.
    """

    def __init__(self, report: Report, *, verbose: bool = False, brief: bool = False) -> None:
        self.report = report
        self.verbose = verbose
        self.brief = brief

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = min(options.max_width, WIDTH)
        for line in console.render_lines(Group(*self._parts()), options.update(width=width), pad=False):
            yield from _plain_end([_ascii(s) for s in line] if options.ascii_only else line)
            yield Segment.line()

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
        if self.brief:
            return
        folded = []
        for status in (Status.UNKNOWN, Status.PASS, Status.SKIPPED):
            chosen = [f for f in findings if f.status is status]
            if chosen and self.verbose:
                yield from map(_finding, chosen)
            elif chosen:
                folded.append((Text(f"{SYMBOLS[status]} {status.upper()}", STYLES[status]), _folded(status, chosen)))
        yield rows(folded)
        yield Text()
        yield rows([(Text(label), Text(text)) for label, text in summary(self.report.facts)])


class Trimmed:
    """A renderable without the blanks at the ends of its lines."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self.inner, options, pad=False):
            yield from _plain_end(line)
            yield Segment.line()


def _ascii(segment: Segment) -> Segment:
    text = segment.text.translate(ASCII).encode("ascii", "replace").decode("ascii")
    return Segment(text, segment.style, segment.control)


def _plain_end(line: list[Segment]) -> list[Segment]:
    """Return `line` without the blanks at its end, which a table fills its columns with and a paste keeps."""
    line = list(line)
    while line and not line[-1].text.strip():
        line.pop()
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def _finding(finding: Finding) -> RenderableType:
    head = Text.assemble(
        (f"{SYMBOLS[finding.status]} {finding.status.upper()}", STYLES[finding.status]),
        f"  {finding.title}  [{finding.id}]",
    )
    lines = [(Text(), Text(finding.what))]
    seen = [Text(f"{_shortened(e.text)}  ({e.source})") for e in finding.evidence]
    lines += [(Text("seen" if n == 0 else ""), text) for n, text in enumerate(seen)]
    if finding.remedy:
        lines.append((Text("fix"), Text(finding.remedy, style="bold")))
    return Group(head, Padding(rows(lines), (0, 0, 0, 2)))


def _shortened(text: str) -> str:
    """Return `text` without its middle where it is long: an error's words stand at its ends. JSON has it whole."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"


def _folded(status: Status, findings: list[Finding]) -> Text:
    count = counted(len(findings), "check")
    if status is Status.PASS:
        return Text(f"{count} passed (-v lists them)")
    if status is Status.SKIPPED:
        return Text(f"{count} not run: {', '.join(dict.fromkeys(f.what.rstrip('.') for f in findings))}")
    more = [f"{len(findings) - NAMED} more"] if len(findings) > NAMED else []
    return Text(f"{count} could not tell (-v says why): {', '.join([f.title for f in findings[:NAMED]] + more)}")


def rows(lines: Sequence[tuple[Text, Text]]) -> Table:
    """Return `lines` of (label, text) in two columns, long texts wrapped in theirs."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=4)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table
