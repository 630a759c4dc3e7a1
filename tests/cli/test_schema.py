"""What `strata doctor --json` prints matches the schema that is published, whatever it is asked."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.cli.runner import MODEL, strata
from tests.doctor.machines import FIXTURES

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text(encoding="utf-8"))


def machine(name: str) -> str:
    return str(FIXTURES / "machines" / f"{name}.json")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [MODEL],
        ["--only", "STR-CPU-ISA"],
        ["--skip", "STR-CPU-ISA", "--strict"],
        ["--facts", machine("seed-000-broken-context")],
        ["--facts", machine("h200-measured"), MODEL],
        ["--facts", machine("8gb-card-no-room"), MODEL, "--vram-budget", "1MiB"],
        ["--facts", machine("macbook"), MODEL, "--max-context", "256"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]) or "this machine",
)
def test_every_report_matches_the_published_schema(arguments: list[str]) -> None:
    document = json.loads(strata("doctor", "--json", *arguments).stdout)
    jsonschema.Draft202012Validator(PUBLISHED).validate(document)
    assert document["schema_version"] == 1


def test_the_schema_refuses_what_is_no_report() -> None:
    document = json.loads(strata("doctor", "--json", "--facts", machine("two-cupys")).stdout)
    validator = jsonschema.Draft202012Validator(PUBLISHED)
    for broken in (
        {**document, "findings": [{"id": "STR-X"}]},
        {**document, "verdict": {**document["verdict"], "outcome": "splendid"}},
        {key: value for key, value in document.items() if key != "facts"},
    ):
        assert not validator.is_valid(broken)
