"""Released models asked for by their headers alone, as `strata plan` would be before a download."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.cards import find_card
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.what_if import what_if_facts
from strata.gguf.model_facts import ModelFacts, read_model_facts
from strata.gguf.reader import open_gguf
from tests.cli.runner import strata
from tests.doctor.golden_plans import MODELS
from tests.doctor.headers import write_header
from tests.doctor.shapes import FLASH_NEXT, GIB, GPT_OSS_20B, Q3_NEXT, Q36_35B


def read_header(m: ModelFacts, folder: Path) -> ModelFacts:
    with open_gguf(write_header(m, folder), header_only=True) as file:
        return read_model_facts(file)


@pytest.mark.parametrize("shape", MODELS, ids=lambda m: m.name)
def test_the_header_says_what_the_golden_plans_rest_on(shape: ModelFacts, tmp_path: Path) -> None:
    read = read_header(shape, tmp_path)
    for name in (
        "name",
        "architecture",
        "layers",
        "embedding",
        "heads",
        "kv_heads",
        "key_length",
        "value_length",
        "vocab",
        "context_length",
        "experts",
        "top_k",
        "expert_width",
        "embedding_table",
        "head",
        "recurrent_state_bytes",
        "index_values",
        "window",
        "windowed_layers",
    ):
        assert getattr(read, name) == getattr(shape, name), name
    assert read.row_tables.bytes == shape.row_tables.bytes
    assert (read.draft.bytes > 0) == (shape.draft.bytes > 0)
    if shape is FLASH_NEXT:  # of which the size of its experts is published and their types are not
        assert read.expert_classes[0].bytes == pytest.approx(shape.expert_classes[0].bytes, rel=0.2)
        return
    by_layer = [{layer: (c.bytes, c.types) for c in m.expert_classes for layer in c.layers} for m in (read, shape)]
    assert by_layer[0] == by_layer[1]


@pytest.mark.parametrize("shape", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("card", ["RTX 3060", "RTX 4090", "H100"])
def test_a_plan_from_the_header_is_the_golden_one_but_for_the_dense_part(
    shape: ModelFacts, card: str, tmp_path: Path
) -> None:
    """The golden plans leave out norms and routers, and hybrids' dense parts are as reports give them."""
    facts, _ = what_if_facts(find_card(card), 64 * GIB)
    options = PlanOptions(device="cuda", max_context=16_384)
    ours, golden = (make_plan(facts, m, options) for m in (read_header(shape, tmp_path), shape))
    assert ours.feasible == golden.feasible
    other = {"dense", "expert_slots", "expert_slots.0", "expert_slots.1", "draft_layers", "experts_file"}
    fixed = [
        {line.id: line.bytes for line in p.reservations if line.id not in other and line.tier is not Tier.PAGEABLE}
        for p in (ours, golden)
    ]
    assert fixed[0].keys() - {"experts_pinned"} == fixed[1].keys() - {"experts_pinned"}
    for id in ("head", "kv_cache", "recurrent_state", "embedding", "logits"):
        assert fixed[0].get(id) == fixed[1].get(id), id


# Dense weights beside head and embedding, GiB as Q8_0: hand arithmetic from the public shapes, routers as float32.
@pytest.mark.parametrize(
    ("shape", "weights", "router"),
    [
        (GPT_OSS_20B, 24 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64), 24 * 2880 * 32),
        (
            Q3_NEXT,
            12 * 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256)
            + 36 * 2048 * (8192 + 4096 + 64 + 4096)
            + 48 * 3 * 2048 * 512,
            48 * 2048 * 512,
        ),
        (
            Q36_35B,
            10 * 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256)
            + 30 * 2048 * (8192 + 4096 + 64 + 4096)
            + 40 * 3 * 2048 * 512,
            40 * 2048 * 256,
        ),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_dense_part_by_hand(shape: ModelFacts, weights: int, router: int, tmp_path: Path) -> None:
    assert read_header(shape, tmp_path).dense.bytes == pytest.approx(weights / 32 * 34 + 4 * router, rel=0.01)


def test_the_command_plans_for_a_header_and_a_card_that_one_does_not_have(tmp_path: Path) -> None:
    path = write_header(FLASH_NEXT, tmp_path)
    assert path.stat().st_size < 1 << 20
    result = strata("plan", str(path), "--gpu", "RTX 5090", "--ram", "64GiB")
    assert result.returncode == 0, result.stderr
    assert "fits: Qwen3.8-Flash-Next on RTX 5090" in result.stdout
    assert "Plan only" in result.stdout
