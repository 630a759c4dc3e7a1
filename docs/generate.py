"""Writes the pages of docs/ that are made from the code. Run it after changing a check or a fact."""

import json
from pathlib import Path

from strata.doctor.catalogue import catalogue_markdown
from strata.doctor.findings import report_schema

DOCS = Path(__file__).parent

if __name__ == "__main__":
    (DOCS / "checks.md").write_text(catalogue_markdown(), encoding="utf-8")
    (DOCS / "report.schema.json").write_text(json.dumps(report_schema(), indent=1) + "\n", encoding="utf-8")
