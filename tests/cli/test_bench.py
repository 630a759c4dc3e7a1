"""`strata bench` as a person runs it."""

import json

from tests.cli.runner import MODEL, assert_clear, strata

SMALL = ("bench", MODEL, "--device", "cpu", "-p", "8", "-n", "4", "-d", "0,8", "-r", "2")


def test_a_table_that_can_be_pasted() -> None:
    result = strata(*SMALL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert len({row.count("|") for row in rows}) == 1
    assert "decode 4 at 8" in rows[-1]
    assert "tiny-qwen3moe" in lines[0]


def test_json_is_one_document() -> None:
    document = json.loads(strata(*SMALL, "--json").stdout)
    assert [r["test"] for r in document["results"]] == ["prompt", "decode", "decode"]
    assert all(len(r["tokens_per_s"]) == 2 for r in document["results"])
    assert document["loading"]["read_bytes"] > 0


def test_what_cannot_be_measured_is_refused() -> None:
    assert_clear(strata("bench", MODEL, "-p", "8,x"), 2, "--prompts 8,x", "numbers from 1")
    assert_clear(
        strata("bench", MODEL, "--device", "cpu", "-p", "64", "-n", "0", "--max-context", "32"),
        2,
        "--max-context 64 or more",
    )
