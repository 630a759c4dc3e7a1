"""The catalogue of checks for reading: as a list, one check's page, and docs/checks.md."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from strata.doctor.checks.check import Check
from strata.doctor.checks.registry import CATALOGUE, FAMILIES, find_check
from strata.doctor.report import Trimmed, rows


def check_entries(id: str | None = None) -> list[dict[str, object]]:
    """Return every check, or the one called `id`, as JSON has them: id, title, explanation, needs, essential.

    Raises
    ------
    UsageError
        When there is no check called `id`.
    """
    chosen = CATALOGUE.values() if id is None else [find_check(id)]
    return [
        {
            "id": check.id,
            "title": check.title,
            "explanation": " ".join(check.explanation.split()),
            "needs": check.needs,
            "essential": check.essential,
        }
        for check in chosen
    ]


def check_list() -> RenderableType:
    """Return every check's id and title, in the order of a report."""
    return Trimmed(rows([(Text(check.id), Text(check.title)) for check in CATALOGUE.values()]))


def check_page(id: str) -> RenderableType:
    """Return what one check looks at, what its failure means and what helps.

    Raises
    ------
    UsageError
        When there is no check called `id`.
    """
    check = find_check(id)
    facts = ", ".join(check.needs) or "how the probes ended"
    return Trimmed(
        Group(
            Text.assemble((check.title, "bold"), f"  [{check.id}]"),
            Text(),
            Text(" ".join(check.explanation.split())),
            Text(),
            rows([(Text("looks at"), Text(facts))]),
        )
    )


def catalogue_markdown() -> str:
    """Return docs/checks.md."""
    lines = [
        "# Checks",
        "",
        f"What `strata doctor` looks at: {len(CATALOGUE)} checks, each under an id that never changes its meaning.",
        "`strata doctor --explain ID` shows one, `--only ID` and `--skip ID` choose. This page is generated from the",
        "catalogue (`python docs/generate.py`).",
        "",
        "A check passes only when every fact it rests on is known; else it is `unknown`. *Essential* ones leave the",
        "verdict undetermined (exit code 3) while they are unknown.",
    ]
    for family in FAMILIES:
        heading = (family.__doc__ or "").strip().splitlines()[0].rstrip(".")
        lines += ["", f"## {heading}"]
        for check in vars(family).values():
            if isinstance(check, Check):
                lines += ["", f"### {check.id}: {check.title}", "", check.explanation, "", *_details(check)]
    return "\n".join(lines) + "\n"


def _details(check: Check) -> list[str]:
    facts = ", ".join(f"`{path}`" for path in check.needs) or "how the probes ended"
    return [f"Rests on: {facts}." + (" Essential." if check.essential else "")]
