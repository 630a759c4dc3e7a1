"""Plans of released models on common cards: as recorded, and checked by hand arithmetic."""

from math import ceil

import pytest

from strata.doctor.cards import find_card
from strata.doctor.plan import Tier
from tests.doctor.golden_plans import CARDS, MODELS, TABLE, plan, table
from tests.doctor.shapes import FLASH_NEXT, GIB, MIB, Q3_30B

KIB = 1024


def test_the_plans_are_those_recorded():
    assert table() == TABLE.read_text()


# From the architecture notes: KV in f16 a token, and recurrent state of a sequence.
@pytest.mark.parametrize(
    ("name", "kv_kib", "state_mib"),
    [
        ("Qwen3-30B-A3B", 96, 0),
        ("Qwen3-235B-A22B", 188, 0),
        ("Qwen3.6-35B-A3B", 20, 60 + 2.8),
        ("Qwen3-Next-80B-A3B", 24, 72 + 3.4),
        ("Qwen3.8-Flash-Next", 24 + 3, 108 + 4.2),
        ("gpt-oss-20b", 48, 0),
    ],
)
def test_caches_and_states_are_those_of_the_architecture(name, kv_kib, state_mib):
    (model,) = (m for m in MODELS if m.name == name)
    p = plan(model, "RTX 4090")
    assert p.line("kv_cache").bytes == pytest.approx(16_384 * kv_kib * KIB, rel=0.01)
    state = p.line("recurrent_state")
    assert (state.bytes / MIB if state else 0) == pytest.approx(state_mib, abs=2)


@pytest.mark.parametrize("card", CARDS)
def test_slots_are_what_the_rest_of_the_card_holds(card):
    """By hand: 30B has experts of 768 x 2048 x (2 x 4.5 + 6.5625) / 8 bytes."""
    p = plan(Q3_30B, card)
    fixed = sum(line.bytes for line in p.reservations if line.tier is Tier.VRAM and line.id != "expert_slots")
    free = find_card(card).vram_bytes - 400 * MIB - 256 * MIB
    expert = 768 * 2048 * (2 * 144 + 210) // 256
    assert p.experts.slots == min(6144, (free - fixed) // (2 * MIB) * (2 * MIB) // expert)


def test_flash_next_on_16_gb_by_hand():
    p = plan(FLASH_NEXT, "RTX 5060 Ti")
    by_hand = {
        "context": 512 * MIB,
        "dense": 3_113_125_000,
        "head": 437_043_200,
        "kv_cache": 16_384 * 27 * KIB,
        "recurrent_state": 36 * (48 * 128 * 128 + 3 * 10_240) * 4,
    }
    for line, nbytes in by_hand.items():
        assert nbytes <= p.line(line).bytes <= nbytes + 2 * MIB


# Published shapes: layers, hidden, heads, KV heads, head size, vocabulary, experts, top-k, expert width; then bytes of
# 256 weights of all three matrices of an expert (Q4_K 144, Q6_K 210, MXFP4 136), of head, of embedding; the card's MiB.
BY_HAND = {
    ("Qwen3-30B-A3B", "RTX 4060"): (48, 2048, 32, 4, 128, 151_936, 128, 8, 768, 144 + 144 + 210, 210, 144, 8188),
    ("Qwen3-235B-A22B", "RTX 4090"): (94, 4096, 64, 4, 128, 151_936, 128, 8, 1536, 144 + 144 + 210, 210, 144, 24_564),
    ("gpt-oss-20b", "RTX 3060"): (24, 2880, 64, 8, 64, 201_088, 32, 4, 2880, 3 * 136, 272, 272, 12_288),
    ("gpt-oss-120b", "RTX 5090"): (36, 2880, 64, 8, 64, 201_088, 128, 4, 2880, 3 * 136, 272, 272, 32_607),
    ("Mixtral-8x7B", "H100"): (32, 4096, 32, 8, 128, 32_000, 8, 2, 14_336, 144 + 144 + 210, 210, 144, 81_559),
}


@pytest.mark.parametrize(("name", "card"), BY_HAND)
def test_five_lines_of_the_table_by_hand(name, card):
    """Slots, KV, VRAM and experts by place from a model's shape alone; the prompt chunk is a choice and is read."""
    layers, hidden, heads, kv_heads, size, vocab, experts, top_k, width, each, head, table, mib = BY_HAND[name, card]
    (row,) = (line for line in TABLE.read_text().splitlines() if line.startswith(f"{name:<20} {card:<12} "))
    fits, *numbers = row[34:].split()
    chunk, slots, total, kv_mib, vram_mib, pinned, pageable, file = map(int, numbers)

    def pieces(nbytes):  # of device memory, 2 MiB each
        return ceil(nbytes / (2 * MIB)) * 2 * MIB

    projections = layers * 2 * hidden * size * (heads + kv_heads)  # q, k, v and the output
    dense = projections // 32 * 34 + 10 * layers * 256  # Q8_0, and each tensor aligned
    kv = 16_384 * layers * kv_heads * 2 * size * 2 + (2 * layers - 1) * 256  # f16, and each array aligned
    for_a_token = (
        28 * hidden + 6 * ceil(projections / layers / hidden) + top_k * (4 * hidden + 10 * width) + 4 * experts
    )
    workspace = 16 * MIB + chunk * (for_a_token + 24 * top_k)
    fixed = sum(
        map(
            pieces,
            (
                *(512 * MIB, 64 * MIB, 64 * MIB),  # context, kernels, graphs
                *(dense, hidden * vocab // 256 * head, kv, workspace),
                *(4 * vocab, 8 * vocab, 16 * layers * experts),  # logits, sampler, tables
            ),
        )
    )
    expert = hidden * width // 256 * each
    free = (mib - 400 - 256) * MIB  # the driver's share, and the reserve
    fit = (free - fixed) // (2 * MIB) * 2 * MIB // expert
    assert (fits, total) == ("yes", layers * experts)
    assert slots == min(fit, total)
    assert kv_mib == pieces(kv) // MIB
    assert vram_mib == (fixed + pieces(slots * expert)) // MIB
    ram = 60 * GIB - 768 * MIB - 1024 * vocab - 2 * top_k * expert - hidden * vocab // 256 * table
    held = 0 if slots == total else min(total, ram // expert)
    assert (pinned, pageable, file) == (held, 0, total - held)
