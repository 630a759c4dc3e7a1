"""Pages that are made from the code are those that the code makes now."""

import json
from pathlib import Path

import yaml

from strata.doctor.catalogue import catalogue_markdown
from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.findings import report_schema

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


def test_the_readme_counts_the_checks_right() -> None:
    assert f"runs {len(CATALOGUE)} checks" in (REPO / "README.md").read_text(encoding="utf-8")
