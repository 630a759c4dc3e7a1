"""Cards by the names that people and drivers use, and machines imagined from them."""

from pathlib import Path

import pytest

from strata.doctor.cards import CARDS, find_card, known_card
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.what_if import what_if_facts
from strata.errors import UsageError
from tests.doctor.shapes import GIB, MIB, Q3_30B


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("RTX 4090", "RTX 4090"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("rtx4060", "RTX 4060 8GB"),
        ("RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("RTX 5060 Ti 16GB", "RTX 5060 Ti 16GB"),
        ("rtx 5070 ti", "RTX 5070 Ti"),
        ("h100", "H100 80GB"),
    ],
)
def test_a_card_is_found_by_what_people_call_it(asked, found):
    assert find_card(asked).name == found


@pytest.mark.parametrize("asked", ["", "RTX", "16GB", "RTX 9999", "RTX 5060 Ti 8GB", "Radeon"])
def test_an_unknown_card_is_refused_with_names(asked):
    with pytest.raises(UsageError) as caught:
        find_card(asked)
    assert "RTX" in caught.value.remedy


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5060 Ti", "RTX 5060 Ti 16GB"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA GPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA", None),
    ],
)
def test_the_drivers_name_leads_to_the_published_figures(reported, found):
    card = known_card(reported)
    assert (card and card.name) == found


def test_the_table_makes_sense():
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert 6 * GIB < card.vram_bytes < 200 * GIB
        assert card.link < card.bandwidth / 10


@pytest.mark.parametrize("system", ["linux", "windows", "wsl2"])
def test_an_imagined_machine_has_a_plan_and_says_what_was_assumed(system):
    facts, assumed = what_if_facts(find_card("RTX 3060"), 64 * GIB, system=system)
    plan = make_plan(facts, Q3_30B, PlanOptions(device="cuda"))
    assert plan.feasible
    assert any("RTX 3060" in sentence for sentence in assumed)
    pinned = plan.planned_bytes(Tier.PINNED)
    if system == "linux":
        assert plan.experts.pinned == plan.experts.total
    else:
        assert pinned <= {"windows": 0, "wsl2": 512 * MIB}[system]


def test_wsl2_has_half_of_the_machines_ram():
    facts, assumed = what_if_facts(find_card("RTX 4090"), 64 * GIB, system="wsl2")
    assert facts.host.value.ram_total_bytes == 32 * GIB
    assert any("half" in sentence for sentence in assumed)


def test_the_document_lists_every_card_as_the_table_has_it():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    for card in CARDS:
        assert f"| {card.name} | {card.vram_bytes // MIB:,} | {card.bandwidth / 1e9:,.0f} | {card.link_name}, " in text
