"""The golden table of plans: released models on cards of 8 to 80 GB, one line each.

``python -m tests.doctor.golden_plans`` writes the table anew; read the difference before it is committed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from strata.doctor.cards import find_card
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.doctor.what_if import what_if_facts
from strata.gguf.model_facts import ModelFacts
from tests.doctor.shapes import (
    FLASH_NEXT,
    GIB,
    GPT_OSS_20B,
    GPT_OSS_120B,
    MIB,
    MIXTRAL,
    Q3_30B,
    Q3_235B,
    Q3_NEXT,
    Q36_35B,
)

TABLE = Path(__file__).parents[2] / "fixtures" / "plans" / "cards.txt"
CARDS = ("RTX 4060", "RTX 3060", "RTX 5060 Ti", "RTX 4090", "RTX 5090", "H100")
MODELS = (Q3_30B, Q3_235B, Q36_35B, Q3_NEXT, FLASH_NEXT, GPT_OSS_20B, GPT_OSS_120B, MIXTRAL)
OPTIONS = PlanOptions(device="cuda", max_context=16_384)
RAM = 64 * GIB
_HEADER = "model                card          fits chunk   slots of   total  KV MiB VRAM MiB  pinned pageable    file"


def plan(model: ModelFacts, card: str, prefill: int | None = None) -> AllocationPlan:
    """Plan a model on a Linux machine with a card and 64 GiB of RAM."""
    facts, _ = what_if_facts(find_card(card), RAM)
    return make_plan(facts, model, msgspec.structs.replace(OPTIONS, prefill=prefill))


def row(model: ModelFacts, card: str) -> str:
    """Return one line of the table."""
    p = plan(model, card)
    e = p.experts
    kv = p.line("kv_cache")
    used = p.planned_bytes(Tier.VRAM) // MIB
    return (
        f"{model.name:<20} {card:<12} {'yes' if p.feasible else 'no':>5} {p.chunk:>5} {e.slots:>7} {e.total:>10} "
        f"{kv.bytes // MIB if kv else 0:>7} {used:>8} {e.pinned:>7} {e.pageable:>8} {e.file:>7}"
    )


def table() -> str:
    """Return the whole table."""
    return "\n".join([_HEADER, *(row(model, card) for model in MODELS for card in CARDS)]) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table())
