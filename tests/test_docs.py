"""Pages that are made from the code are those that the code makes now."""

import json
import re
from pathlib import Path

import yaml

from strata.doctor.catalogue import catalogue_markdown
from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.findings import report_schema
from tests.doctor.machines import cases

REPO = Path(__file__).parent.parent


def test_checks_page_is_up_to_date() -> None:
    assert (REPO / "docs" / "checks.md").read_text(encoding="utf-8") == catalogue_markdown()


def test_published_schema_is_up_to_date() -> None:
    published = json.loads((REPO / "docs" / "report.schema.json").read_text(encoding="utf-8"))
    assert published == json.loads(json.dumps(report_schema()))


def test_bug_reports_require_the_report_as_text() -> None:
    form = yaml.safe_load((REPO / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text(encoding="utf-8"))
    report = next(part for part in form["body"] if part.get("id") == "report")
    assert report["attributes"]["render"] == "text"
    assert report["validations"]["required"] is True
    assert "strata report" in report["attributes"]["description"]


def test_pages_count_checks_and_recorded_machines_right() -> None:
    counts = {"checks": len(CATALOGUE), "recorded machines": len(cases())}
    said = [
        (page.name, int(number), noun)
        for page in (*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *(REPO / "fixtures").rglob("*.md"))
        for number, noun in re.findall(r"\b(\d+)\s+(checks|recorded machines)\b", page.read_text(encoding="utf-8"))
    ]
    assert [page for page, number, noun in said if number != counts[noun]] == []
    assert {("README.md", noun) for noun in counts} <= {(page, noun) for page, _, noun in said}


def test_the_index_names_every_page() -> None:
    docs = REPO / "docs"
    named = set(re.findall(r"\]\(([^)]+)\)", (docs / "README.md").read_text(encoding="utf-8")))
    assert named == {page.name for page in docs.iterdir() if page.suffix in (".md", ".json") and page.stem != "README"}
