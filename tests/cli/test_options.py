"""Sizes, counts and choices on the command line."""

import pytest
import typer

from strata.cli.options import parse_auto, parse_size, plan_options
from strata.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("64k", 64 << 10),
        ("8GB", 8 * 10**9),
        ("100B", 100),
        ("0MiB", 0),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8", "GiB", "-1GiB", "8 parsecs", "1e9B", "0x10MiB", "8GiBs", "9" * 400 + "GiB", "99999999TiB"]
)
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


def test_auto_or_count() -> None:
    assert parse_auto("auto") == 0
    assert parse_auto("12") == 12
    for text in ("0", "-3", "many", "1.5", "9" * 5000):
        with pytest.raises(typer.BadParameter):
            parse_auto(text)


def test_plan_options_carry_bytes_and_none_for_auto() -> None:
    options = plan_options(vram_reserve_mib=700, expert_cache=0, prefill=128)
    assert options.vram_reserve_bytes == 700 << 20
    assert options.expert_cache is None
    assert options.prefill == 128


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(UsageError, match="auto, cpu, cuda"):
        plan_options(device="tpu")
    with pytest.raises(UsageError, match="f16"):
        plan_options(kv="q4")


def test_options_that_contradict_or_mean_no_machine_are_refused() -> None:
    with pytest.raises(UsageError, match="--gpu 0"):
        plan_options(device="cpu", gpu="0")
    with pytest.raises(UsageError, match="no device has as much"):
        plan_options(vram_reserve_mib=10**20)
