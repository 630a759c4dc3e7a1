"""`strata bench` as a person runs it."""

import json

import pytest

from strata.cli.bench import expected_of_result, is_inside, markdown
from strata.doctor.facts_io import read_facts
from strata.doctor.plan import AllocationPlan, PlanOptions
from strata.doctor.planner import make_plan
from strata.runtime.bench import BenchResult
from tests.cli.runner import GOLDEN, MODEL, assert_clear, strata
from tests.doctor.shapes import Q3_30B

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
    for result in document["results"]:
        slow, fast = result["expected_tokens_per_s"]
        assert 0 < slow < fast <= 2.000001 * slow
        assert result["inside_expected"] == (slow <= result["median_tokens_per_s"] <= fast)


def test_what_cannot_be_measured_is_refused() -> None:
    assert_clear(strata("bench", MODEL, "-p", "8,x"), 2, "--prompts 8,x", "numbers from 1")
    assert_clear(
        strata("bench", MODEL, "--device", "cpu", "-p", "64", "-n", "0", "--max-context", "32"),
        2,
        "--max-context 64 or more",
    )


def measured(test: str, tokens: int, depth: int, per_s: float, misses: int = 0, repetitions: int = 2) -> BenchResult:
    return BenchResult(
        test=test,
        tokens=tokens,
        depth=depth,
        tokens_per_s=(per_s,) * repetitions,
        median_tokens_per_s=per_s,
        step_s=None,
        bytes_per_token=None,
        bytes_per_s=None,
        distinct_experts=0,
        hit_rate=None,
        misses=misses,
        filled_bytes={},
        filled_bytes_per_s=0.0,
    )


H200 = read_facts(GOLDEN.parent / "machines" / "h200-measured.json")
PLAN = make_plan(H200, Q3_30B, PlanOptions(device="cuda", max_context=4096))
EIGHT = make_plan(H200, Q3_30B, PlanOptions(device="cuda", max_context=4096, prefill=8))  # tokens a call


# Measured on an H200, docs/benchmarks.md.
@pytest.mark.parametrize(
    ("plan", "test", "tokens", "depth", "per_s"),
    [
        (PLAN, "prompt", 128, 0, 3717.6),
        (PLAN, "prompt", 512, 0, 9476.7),
        (PLAN, "prompt", 2048, 0, 13_831.5),
        (EIGHT, "prompt", 128, 0, 922.4),
        (EIGHT, "prompt", 512, 0, 904.7),
        (EIGHT, "prompt", 2048, 0, 807.5),
        (PLAN, "decode", 128, 0, 444.8),
        (PLAN, "decode", 128, 128, 432.3),
        (PLAN, "decode", 128, 1024, 426.5),
        (PLAN, "decode", 128, 3800, 393.5),
    ],
)
def test_what_was_measured_lies_in_what_was_expected(
    plan: AllocationPlan, test: str, tokens: int, depth: int, per_s: float
) -> None:
    result = measured(test, tokens, depth, per_s)
    expected = expected_of_result(H200, Q3_30B, plan, result)
    assert is_inside(result, expected)
    assert not is_inside(measured(test, tokens, depth, 3 * per_s), expected)
    assert not is_inside(measured(test, tokens, depth, per_s / 3), expected)


def test_a_case_outside_its_range_is_called_so_in_the_table() -> None:
    results = (measured("decode", 128, 0, 444.8), measured("decode", 128, 128, 4000.0))
    ranges = tuple(expected_of_result(H200, Q3_30B, PLAN, result) for result in results)
    inside, outside = markdown(PLAN, results, ranges, 4e12).splitlines()[-2:]
    assert "268 to 535 |" in inside
    assert "OUTSIDE" in outside
    assert "OUTSIDE" not in inside


def test_misses_are_those_of_one_repetition() -> None:
    plan = make_plan(H200, Q3_30B, PlanOptions(device="cuda", max_context=4096, expert_cache=3072))
    none, once, twice = (
        expected_of_result(H200, Q3_30B, plan, measured("decode", 128, 0, 1.0, misses, repetitions))
        for misses, repetitions in ((0, 1), (5000, 1), (10_000, 2))
    )
    assert once == twice
    assert once[0] < none[0]


# Measured on H200s with fewer slots than experts, docs/benchmarks.md: slots, GiB page-locked, misses a token, tokens/s.
@pytest.mark.parametrize(
    ("slots", "pinned_gib", "test", "tokens", "misses", "per_s"),
    [
        (2203, 24, "decode", 128, 0.56, 410.9),
        (2203, 1, "decode", 128, 0.85, 297.3),
        (3607, 24, "decode", 128, 0.0, 415.0),
        (480, 24, "decode", 128, 39.3, 1000 / 5.05),
        (64, 24, "decode", 128, 333, 1000 / 23.04),
        (2203, 24, "prompt", 512, 2.07, 741.5),  # misses by the rate of filling, 3.06 MB each
        (2203, 1, "prompt", 512, 2.1, 419.6),
        (3607, 24, "prompt", 512, 0.99, 789.2),
    ],
)
def test_what_was_measured_with_misses_lies_in_what_was_expected(
    slots: int, pinned_gib: int, test: str, tokens: int, misses: float, per_s: float
) -> None:
    options = PlanOptions(device="cuda", max_context=640, expert_cache=slots, pinned_budget_bytes=pinned_gib << 30)
    plan = make_plan(H200, Q3_30B, options)
    assert (plan.experts.pinned == plan.experts.total) == (pinned_gib == 24)
    depth = 128 if test == "decode" else 0
    result = measured(test, tokens, depth, per_s, round(2 * misses * tokens))
    assert is_inside(result, expected_of_result(H200, Q3_30B, plan, result))
