"""Plans of released models on common cards: as recorded, and checked by hand arithmetic."""

import pytest

from strata.doctor.cards import find_card
from strata.doctor.plan import Tier
from tests.doctor.golden_plans import CARDS, MODELS, TABLE, plan, table
from tests.doctor.shapes import FLASH_NEXT, GPT_OSS_20B, MIB, Q3_30B

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


def test_a_window_that_attention_cannot_use_yet_is_said_with_what_it_would_save():
    """12 of 24 layers keep 128 + 2,048 of 16,384 cells: 8 heads x 128 values x 2 bytes a cell."""
    note = next(note for note in plan(GPT_OSS_20B, "RTX 4090").notes if "windowed" in note)
    saved = 12 * (16_384 - 2176) * 8 * 128 * 2
    assert note.startswith("Layers that see 128 tokens only: 12 of 24.")
    told = float(note.split("would take ")[1].split(" MiB less")[0])
    assert told == pytest.approx(saved / MIB, abs=2)  # the line is in steps of 2 MiB
    assert not any("windowed" in note for note in plan(Q3_30B, "RTX 4090").notes)


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


def steps(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def test_every_fixed_line_of_30b_on_a_4090_by_hand():
    """48 layers, width 2048, 32 heads and 4 KV heads of 128, 128 experts of 768, 8 of them used; calls of 8 tokens."""
    p = plan(Q3_30B, "RTX 4090", prefill=8)
    # Q8_0 stores 32 weights in 34 bytes, Q6_K 256 in 210, Q4_K 256 in 144. Ten tensors a layer.
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048  # q, k and v, output
    row = 2048 // 256 * 144  # of the embedding, for one token
    workspace = [
        8 * 2048 * 4,  # the residual stream
        8 * 4096 * 4,  # q
        8 * 512 * 4,  # k
        8 * 512 * 4,  # v
        8 * 4096 * 4,  # what attention gives
        64 * 4,  # rotary frequencies
        128 + 8 * row,  # position, tokens and sampling; then the tokens' rows
        4_194_304,  # a piece of the file
        8 * 32 * 32 * (128 + 2) * 4,  # attention in 32 parts: values, maximum and sum
        8 * 32 * 4,  # how many parts are done
        2374 * 4,  # maxima of 64 logits each: 151,936 / 64
        4,  # the token that was chosen
        8 * 2048 * 4,  # the normed stream
        48 * 8 * 8 * 4,  # chosen experts of all layers
        8 * 8 * 4,  # their slots
        8 * 8 * 4,  # their weights
        8 * 128 * 4,  # the router's logits
        8 * 8 * 768 * 4,  # between gate and up, and down
        *(6144 * size for size in (4, 4, 8, 8)),  # of each expert: slot, owner of a slot, use, source
        48 * 4,  # calls of the layers
        4 * 8,  # hits, misses, evictions, bytes
        4 + 8 * 8 * 8,  # what the host has to bring
    ]
    host_io = [128 + 8 * row, 151_936 * 4, 8 * 4_194_304, 4 * 4, 48 * 8 * 8 * 4, 4 * 4 * 8, 4 + 8 * 8 * 8]
    # Arrays of one line start on multiples of 256 bytes. Device memory comes in 2 MiB, RAM in 4 KiB.
    vram = {
        "context": 512 * MIB,
        "modules": 64 * MIB,
        "graphs": 64 * MIB,
        "dense": 48 * attention // 32 * 34 + 480 * 256,
        "head": 2048 * 151_936 // 256 * 210,
        "kv_cache": 16_384 * 48 * 2 * 4 * 128 * 2 + 95 * 256,
        "workspace": sum(workspace) + 24 * 256,
        "logits": 151_936 * 4,
    }
    pinned = {
        "host_io": sum(host_io) + 6 * 256,
        "embedding": 2048 * 151_936 // 256 * 144,
        "staging_ring": 2 * 8 * 768 * 2048 * (2 * 144 + 210) // 256,
    }
    lines = {line.id: (line.tier, line.bytes) for line in p.reservations}
    slots = lines.pop("expert_slots")
    assert slots == (Tier.VRAM, steps(6144 * 768 * 2048 * (2 * 144 + 210) // 256, 2 * MIB))
    assert lines.pop("process") == (Tier.PAGEABLE, 768 * MIB + 151_936 * KIB)
    assert lines.pop("experts_file")[0] is Tier.FILE
    by_hand = {id: (Tier.VRAM, steps(nbytes, 2 * MIB)) for id, nbytes in vram.items()}
    by_hand |= {id: (Tier.PINNED, steps(nbytes, 4 * KIB)) for id, nbytes in pinned.items()}
    assert lines == by_hand
