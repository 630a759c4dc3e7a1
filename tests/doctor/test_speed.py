"""The expected speed: its range, its parts, and what makes it better."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata.doctor.cards import find_card
from strata.doctor.expectation import Turn, expected_of_turn
from strata.doctor.facts import Probe, ProbeStatus, SpeedFacts
from strata.doctor.facts_io import read_facts
from strata.doctor.plan import PlanOptions, Tier
from strata.doctor.planner import backend_for, make_plan, request_for
from strata.doctor.speed import (
    Placement,
    Range,
    decode_seconds,
    expected_speed,
    hit_rate,
    prefill_seconds,
    speed_of_turn,
)
from strata.doctor.what_if import what_if_facts
from strata.gguf.model_facts import ModelFacts
from tests.doctor.shapes import GIB, Q3_30B, Q36_35B, machine, model

FACTS, _ = what_if_facts(find_card("H200"), 128 * GIB)
OPTIONS = PlanOptions(device="cuda")
BACKEND = backend_for(FACTS, Q3_30B, OPTIONS)
TRAFFIC = BACKEND.traffic(request_for(BACKEND, Q3_30B, OPTIONS))
H200 = read_facts(Path(__file__).parents[2] / "fixtures" / "machines" / "h200-measured.json")
DEMO = model(
    "demo",
    "llama",
    layers=30,
    embedding=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    experts=8,
    top_k=8,
    width=192,
    expert_types=(("Q4_1",) * 3,),
    table_type="Q8_0",
    head_type="Q8_0",
)
HALF = Placement(512, Tier.PINNED, Tier.PINNED, slots=3072, pinned=2000, pageable=2000)


def test_the_range_is_a_factor_of_two_and_says_what_it_rests_on():
    for facts, device in ((FACTS, "cuda"), (machine(24 * GIB), "cpu")):
        expected = make_plan(facts, Q3_30B, PlanOptions(device=device)).expected
        for slow, fast in (expected.decode_tokens_per_s, expected.prefill_tokens_per_s):
            assert 0 < slow < fast <= 2.000001 * slow
        assert any("RAM reads at" in sentence for sentence in expected.basis)


@pytest.mark.parametrize(
    "better",
    [
        replace(HALF, slots=3073),
        replace(HALF, pinned=2001),
        replace(HALF, pageable=2001),
        replace(HALF, pinned=2001, pageable=1999),
    ],
)
def test_more_of_anything_is_quicker(better):
    for seconds in (decode_seconds, prefill_seconds):
        assert seconds(TRAFFIC, BACKEND.speeds, better) < seconds(TRAFFIC, BACKEND.speeds, HALF)


def test_larger_chunks_read_prompts_quicker():
    times = [prefill_seconds(TRAFFIC, BACKEND.speeds, replace(HALF, chunk=c)) for c in (1, 16, 512, 4096)]
    assert times == sorted(times, reverse=True)


def test_a_ring_that_is_not_page_locked_is_slower():
    slow = decode_seconds(TRAFFIC, BACKEND.speeds, replace(HALF, staging=Tier.PAGEABLE))
    assert slow > decode_seconds(TRAFFIC, BACKEND.speeds, HALF)


def test_the_hit_rate_is_near_the_published_ones_and_never_above_them():
    assert hit_rate(0) == 0
    assert hit_rate(1) == 1
    for slots, misses in ((4008, 105), (10_200, 15)):
        published = 1 - misses / 480
        assert published - 0.15 < hit_rate(slots / 24_576) <= published


def test_bytes_a_token_reads_add_up():
    expected = expected_speed(TRAFFIC, BACKEND.speeds, HALF)
    misses = 48 * 8 * (1 - hit_rate(0.5)) * TRAFFIC.stored_bytes
    away = sum(nbytes for tier, nbytes in expected.bytes_per_token.items() if tier is not Tier.VRAM)
    assert away == pytest.approx(misses, rel=0.001)
    assert expected.bytes_per_token[Tier.PINNED] == pytest.approx(misses * 2000 / 6144, rel=0.001)


# Measured or published elsewhere, all experts in VRAM: decode tokens/s.
@pytest.mark.parametrize(("card", "model", "seen"), [("H200", Q3_30B, 293), ("RTX 5060 Ti", Q36_35B, 62)])
def test_what_others_measured_lies_in_the_range(card, model, seen):
    facts, _ = what_if_facts(find_card(card), 64 * GIB)
    slow, fast = make_plan(facts, model, OPTIONS).expected.decode_tokens_per_s
    assert 0.8 * slow <= seen <= fast


def test_a_turn_with_the_misses_that_were_guessed_has_the_speed_that_was_guessed():
    misses = 48 * 8 * (1 - hit_rate(0.5))
    chunks, distinct = 512, 6144 * (1 - (1 - 8 / 128) ** 8)  # 4,096 tokens, eight at a time where experts are missed
    decode, prefill = speed_of_turn(
        TRAFFIC, BACKEND.speeds, HALF, prefill_misses=chunks * distinct / 2, misses_per_token=misses
    )
    expected = expected_speed(TRAFFIC, BACKEND.speeds, HALF)
    assert decode == pytest.approx(expected.decode_tokens_per_s)
    assert prefill == pytest.approx(expected.prefill_tokens_per_s)
    without = speed_of_turn(TRAFFIC, BACKEND.speeds, HALF, prefill_misses=0, misses_per_token=0)
    assert without[0] > decode
    assert without[1] > prefill


# Measured on two cores that read RAM at 34.8 GB/s, with nothing else running: tokens/s after and of a prompt.
@pytest.mark.parametrize(
    ("prompt", "decode", "prefill"),
    [(19, None, 198), (37, None, 307), (128, None, 497), (512, 33.8, 563), (2048, None, 419), (4000, None, 328)],
)
def test_what_was_measured_on_a_cpu_lies_in_the_range(prompt, decode, prefill):
    """The demo: 30 layers, width 576, 8 experts of 192, all in use and in their slots."""
    facts = machine(20 * GIB, cpu_physical=2)
    speed = SpeedFacts(ram_read_bytes_per_s={2: 34.8e9})
    facts = msgspec.structs.replace(facts, speed=Probe(status=ProbeStatus.OK, value=speed))
    plan = make_plan(facts, DEMO, PlanOptions())
    turn = Turn(start=0, prompt=prompt, answer=0, prefill_misses=0, decode_misses=0)
    writing, reading = expected_of_turn(facts, DEMO, plan, turn)
    assert reading[0] <= prefill <= reading[1]
    if decode:
        assert writing[0] <= decode <= writing[1]


# What `strata bench` measured on the machine of the facts, all experts in VRAM (docs/benchmarks.md): tokens/s.
@pytest.mark.parametrize(("prompt", "seen"), [(128, 922.4), (512, 904.7), (2048, 807.5)])
def test_prompts_measured_on_a_gpu_lie_in_the_range(prompt: int, seen: float) -> None:
    _, (slow, fast) = of_turn(Q3_30B, 4096, start=0, prompt=prompt, answer=0, chunk=8)
    assert slow <= seen <= fast


@pytest.mark.parametrize(("prompt", "seen"), [(128, 3717.6), (512, 9476.7), (2048, 13_831.5)])
def test_prompts_in_large_chunks_measured_on_a_gpu_lie_in_the_range(prompt: int, seen: float) -> None:
    _, (slow, fast) = of_turn(Q3_30B, 4096, start=0, prompt=prompt, answer=0)
    assert slow <= seen <= fast


@pytest.mark.parametrize(("start", "seen"), [(0, 444.8), (128, 432.3), (1024, 426.5), (3800, 393.5), (31_936, 234)])
def test_answers_measured_on_a_gpu_lie_in_the_range(start: int, seen: float) -> None:
    (slow, fast), _ = of_turn(Q3_30B, 32_768, start=start, prompt=0, answer=128)
    assert slow <= seen <= fast


def test_a_small_model_measured_on_a_gpu_lies_in_the_range() -> None:
    for start, seen in ((0, 1482), (512, 1388)):
        (slow, fast), _ = of_turn(DEMO, 4096, start=start, prompt=0, answer=128)
        assert slow <= seen <= fast
    _, (slow, fast) = of_turn(DEMO, 4096, start=0, prompt=512, answer=0, chunk=8)
    assert slow <= 5401 <= fast


def of_turn(
    m: ModelFacts, context: int, *, start: int, prompt: int, answer: int, chunk: int | None = None
) -> tuple[Range, Range]:
    options = PlanOptions(device="cuda", max_context=context, prefill=chunk)
    turn = Turn(start=start, prompt=prompt, answer=answer, prefill_misses=0, decode_misses=0)
    return expected_of_turn(H200, m, make_plan(H200, m, options), turn)


def test_one_token_after_nothing_has_a_range_too() -> None:
    (slow, fast), _ = of_turn(DEMO, 4096, start=0, prompt=0, answer=1)
    assert 0 < slow < fast


def test_misses_from_page_locked_memory_take_their_bytes_over_the_link_and_nothing_else() -> None:
    resident = Placement(8, Tier.PINNED, Tier.PINNED, slots=6144, pinned=0, pageable=0)
    cached = replace(resident, slots=3072, pinned=6144)
    without = decode_seconds(TRAFFIC, BACKEND.speeds, resident)
    missed = 48 * 8 * (1 - hit_rate(0.5)) * TRAFFIC.stored_bytes
    assert decode_seconds(TRAFFIC, BACKEND.speeds, cached) == pytest.approx(without + missed / 53e9)


def test_the_host_looks_at_every_layer_where_the_device_cannot_fetch_by_itself() -> None:
    all_pinned = Placement(8, Tier.PINNED, Tier.PINNED, slots=6143, pinned=6144, pageable=0)
    one_elsewhere = replace(all_pinned, pinned=6143, pageable=1)
    gained = decode_seconds(TRAFFIC, BACKEND.speeds, one_elsewhere) - decode_seconds(
        TRAFFIC, BACKEND.speeds, all_pinned
    )
    assert gained == pytest.approx(48 * 27e-6, rel=0.01)
