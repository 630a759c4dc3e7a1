"""Plans for CUDA: what a card offers, the fallbacks of the host, and the two bug reports the project comes from."""

import re

import msgspec
import pytest

from strata.doctor.facts import CudaDevice, CudaFacts, PinnedFacts, Probe, ProbeStatus
from strata.doctor.invariants import broken
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.errors import Undetermined, UsageError
from tests.doctor.machines_with_gpus import (
    PINNED_45_GIB,
    REFUSED,
    gpu_machine,
    rtx_4090_on_wsl2,
    rtx_5060_ti_on_windows,
)
from tests.doctor.shapes import FLASH_NEXT, GIB, GPT_OSS_20B, MIB, Q3_30B, Q3_235B, Q36_35B, machine

CUDA = PlanOptions(device="cuda")
LINUX = gpu_machine(
    vram_total=24_564 * MIB,
    vram_free=24_000 * MIB,
    ram=60 * GIB,
    pinned=PinnedFacts(asked_bytes=40 * GIB, granted_bytes=40 * GIB),
)


def budget(plan: AllocationPlan, tier: Tier):
    return next(b for b in plan.budgets if b.tier is tier)


def slots_bytes(plan: AllocationPlan) -> int:
    return sum(line.bytes for line in plan.reservations if line.id.startswith("expert_slots"))


def test_all_resident_where_the_card_holds_the_model():
    plan = make_plan(LINUX, Q3_30B, CUDA)
    assert plan.experts.slots == plan.experts.total
    assert (plan.experts.pinned, plan.experts.pageable) == (0, 0)
    assert plan.line("kv_cache").bytes == pytest.approx(4096 * 96 * 1024, rel=0.01)  # 96 KiB a token in f16


def test_known_sizes_of_the_largest_model():
    plan = make_plan(LINUX, FLASH_NEXT, PlanOptions(device="cuda", max_context=131_072, kv="int8"))
    without_index = msgspec.structs.replace(FLASH_NEXT, index_values=0)
    bare = make_plan(LINUX, without_index, plan.options)
    assert bare.line("kv_cache").bytes == pytest.approx(131_072 * 12.375 * 1024, rel=0.002)  # 1.55 GiB as reported
    assert plan.line("recurrent_state").bytes == 114 * MIB  # 112.2 MiB in pieces of 2 MiB
    assert plan.line("head").bytes == 418 * MIB  # 437,043,200 bytes
    assert plan.line("embedding").bytes == pytest.approx(322 * MIB, rel=0.001)
    assert plan.line("draft_layers").tier is Tier.FILE


def test_slots_have_size_classes_in_proportion_and_no_less_than_a_token_needs():
    plan = make_plan(LINUX, FLASH_NEXT, CUDA)
    (large, small) = plan.experts.classes
    assert plan.experts.slots == large.slots + small.slots
    assert large.slots / small.slots == pytest.approx(len(large.layers) / len(small.layers), rel=0.01)
    assert plan.line(large.line).bytes >= large.slots * large.slot_bytes
    fewest = make_plan(LINUX, FLASH_NEXT, PlanOptions(device="cuda", expert_cache=20))
    assert [c.slots for c in fewest.experts.classes] == [10, 10]
    with pytest.raises(UsageError, match="needs 20"):
        make_plan(LINUX, FLASH_NEXT, PlanOptions(device="cuda", expert_cache=19))


def test_free_vram_is_the_lower_of_two_truths_each_before_our_context():
    cuda = CudaDevice(ordinal=0, uuid="GPU-0", vram_free_bytes=20_000 * MIB, context_bytes=300 * MIB)
    facts = gpu_machine(vram_total=24_564 * MIB, vram_free=22_000 * MIB, ram=60 * GIB, cuda=cuda)
    plan = make_plan(facts, Q36_35B, CUDA)
    assert budget(plan, Tier.VRAM).usable_bytes == 20_300 * MIB
    assert plan.line("context").bytes == 300 * MIB
    assert plan.line("context").formula == "measured"


def test_unmeasured_context_is_charged_and_said():
    plan = make_plan(LINUX, Q36_35B, CUDA)
    assert plan.line("context").bytes == 512 * MIB
    assert any("context was not measured" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("display", "host", "reserve"),
    [
        (False, {}, 256),
        (True, {}, 1024),
        (None, {}, 1024),
        (False, {"os": "windows"}, 512),
        (True, {"wsl": "wsl2"}, 1280),
    ],
)
def test_the_reserve_follows_the_desktop_and_who_manages_the_memory(display, host, reserve):
    facts = gpu_machine(vram_total=24 * GIB, vram_free=20 * GIB, ram=60 * GIB, display=display, **host)
    plan = make_plan(facts, Q36_35B, CUDA)
    assert budget(plan, Tier.VRAM).reserve_bytes == reserve * MIB
    assert any("desktop is unknown" in note for note in plan.notes) == (display is None)


def test_the_reserve_and_the_budget_are_as_asked():
    options = PlanOptions(device="cuda", vram_reserve_bytes=700 * MIB, vram_budget_bytes=10 * GIB)
    plan = make_plan(LINUX, Q36_35B, options)
    vram = budget(plan, Tier.VRAM)
    assert (vram.usable_bytes, vram.reserve_bytes) == (10 * GIB, 700 * MIB)
    assert plan.planned_bytes(Tier.VRAM) + 700 * MIB <= 10 * GIB


def test_a_card_larger_than_the_machine_is_capped_under_wsl2():
    facts = gpu_machine(vram_total=96 * GIB, vram_free=95 * GIB, ram=30 * GIB, ram_total_bytes=32 * GIB, wsl="wsl2")
    assert budget(make_plan(facts, Q3_30B, CUDA), Tier.VRAM).usable_bytes == 64 * GIB


def test_an_integrated_gpu_shares_its_memory_with_the_host():
    cuda = CudaDevice(ordinal=0, uuid="GPU-0", vram_free_bytes=30 * GIB, context_bytes=300 * MIB, integrated=True)
    facts = gpu_machine(vram_total=32 * GIB, vram_free=31 * GIB, ram=24 * GIB, cuda=cuda)
    plan = make_plan(facts, Q3_235B, CUDA)
    taken = sum(plan.planned_bytes(tier) for tier in (Tier.VRAM, Tier.PINNED, Tier.PAGEABLE))
    assert plan.feasible
    assert taken <= 24 * GIB - plan.shared[0].reserve_bytes


def test_pinning_is_planned_only_as_far_as_it_was_granted():
    def pinned(facts: PinnedFacts | None, **options: int) -> AllocationPlan:
        machine = gpu_machine(vram_total=8 * GIB, vram_free=8 * GIB, ram=60 * GIB, pinned=facts)
        return make_plan(machine, Q3_30B, PlanOptions(device="cuda", **options))

    assert budget(pinned(None), Tier.PINNED).usable_bytes == 0
    assert any("not measured" in note for note in pinned(None).notes)
    assert budget(pinned(None, pinned_budget_bytes=GIB), Tier.PINNED).usable_bytes == GIB
    granted = PinnedFacts(asked_bytes=2 * GIB, granted_bytes=2 * GIB)
    assert budget(pinned(granted), Tier.PINNED).usable_bytes == 2 * GIB
    assert budget(pinned(granted, pinned_budget_bytes=GIB), Tier.PINNED).usable_bytes == GIB
    refused = PinnedFacts(asked_bytes=2 * GIB, granted_bytes=1000 * MIB, refusal=REFUSED)
    assert budget(pinned(refused), Tier.PINNED).usable_bytes == 800 * MIB
    assert budget(pinned(refused, pinned_budget_bytes=4 * GIB), Tier.PINNED).usable_bytes == 800 * MIB


def test_no_gpu_and_unknown_vram_are_undetermined():
    with pytest.raises(Undetermined, match="none could be read"):
        make_plan(machine(8 * GIB), Q3_30B, CUDA)
    unknown = gpu_machine(vram_total=24 * GIB, vram_free=None, ram=60 * GIB)
    with pytest.raises(Undetermined, match="--vram-budget"):
        make_plan(unknown, Q3_30B, CUDA)
    plan = make_plan(unknown, Q3_30B, PlanOptions(device="cuda", vram_budget_bytes=12 * GIB))
    assert plan.feasible
    assert any("not verified" in note for note in plan.notes)


def test_a_gpu_is_chosen_by_index_or_uuid():
    assert make_plan(LINUX, Q3_30B, PlanOptions(gpu="0")).device.id == "GPU-0"
    assert make_plan(LINUX, Q3_30B, PlanOptions(gpu="gpu-0")).device.backend == "cuda"
    with pytest.raises(UsageError, match="this machine has 0"):
        make_plan(LINUX, Q3_30B, PlanOptions(gpu="1"))


@pytest.mark.parametrize("kernel_ok", [True, False, None])
def test_auto_takes_a_gpu_that_a_kernel_ran_on(kernel_ok: bool | None):
    device = CudaDevice(ordinal=0, uuid=LINUX.nvml.value.gpus[0].uuid)
    cuda = CudaFacts(devices=(device,), kernel_ok=kernel_ok)
    facts = msgspec.structs.replace(LINUX, cuda=Probe(status=ProbeStatus.OK, value=cuda))
    plan = make_plan(facts, GPT_OSS_20B, PlanOptions())
    assert plan.device.backend == ("cuda" if kernel_ok else "numpy")
    assert any("RTX 4090 is not used" in note for note in plan.notes) is not bool(kernel_ok)
    assert make_plan(facts, GPT_OSS_20B, PlanOptions(device="cpu")).device.backend == "numpy"


# The report of "native head upload: out of memory": the head was allocated after the expert arena was pinned and
# was not part of what the expert cache was sized by.
AS_REPORTED = PlanOptions(device="cuda", max_context=131_072, kv="int8", vram_reserve_bytes=700 * MIB)


@pytest.mark.parametrize("pinned", [None, PINNED_45_GIB], ids=["pinning not measured", "45 GiB granted"])
@pytest.mark.parametrize("monitor_on_card", [False, True])
@pytest.mark.parametrize("context", [131_072, 32_768], ids=["all KV in VRAM", "2 GB of KV elsewhere"])
def test_the_head_is_there_before_the_expert_cache_in_every_state_of_the_report(pinned, monitor_on_card, context):
    facts = rtx_5060_ti_on_windows(monitor_on_card=monitor_on_card, pinned=pinned)
    plan = make_plan(facts, FLASH_NEXT, msgspec.structs.replace(AS_REPORTED, max_context=context))
    assert plan.feasible
    assert not broken(plan)
    ids = [line.id for line in plan.reservations]
    assert ids.index("head") < ids.index("expert_slots.0")
    assert plan.line("head").tier is Tier.VRAM
    assert plan.planned_bytes(Tier.VRAM) + 700 * MIB <= budget(plan, Tier.VRAM).usable_bytes
    tiers = [line.tier for line in plan.reservations]
    if Tier.PINNED in tiers:  # the device's memory is taken before anything is page-locked
        assert max(i for i, t in enumerate(tiers) if t is Tier.VRAM) < tiers.index(Tier.PINNED)


def test_a_monitor_on_the_card_costs_slots_and_nothing_else():
    off = make_plan(rtx_5060_ti_on_windows(monitor_on_card=False), FLASH_NEXT, AS_REPORTED)
    on = make_plan(rtx_5060_ti_on_windows(monitor_on_card=True), FLASH_NEXT, AS_REPORTED)
    assert 0 < slots_bytes(off) - slots_bytes(on) <= 1024 * MIB
    fixed = lambda plan: {r.id: r.bytes for r in plan.reservations if not r.id.startswith("expert")}  # noqa: E731
    assert fixed(on) == fixed(off)


@pytest.mark.parametrize("coupling", ["one budget", "commit limit"])
def test_windows_plans_hold_under_each_coupling(coupling):
    facts = rtx_5060_ti_on_windows(monitor_on_card=False, pinned=PINNED_45_GIB)
    plan = make_plan(facts, FLASH_NEXT, AS_REPORTED)
    names = {"one budget": "VRAM + locked", "commit limit": "commit limit"}
    (shared,) = (s for s in plan.shared if s.name == names[coupling])
    assert sum(plan.planned_bytes(tier) for tier in shared.tiers) + shared.reserve_bytes <= shared.usable_bytes


def test_a_small_page_file_makes_room_by_leaving_experts_in_the_file():
    facts = rtx_5060_ti_on_windows(monitor_on_card=False)
    short = msgspec.structs.replace(facts.host.value, commit_limit_bytes=40 * GIB)
    facts = msgspec.structs.replace(facts, host=msgspec.structs.replace(facts.host, value=short))
    plan = make_plan(facts, FLASH_NEXT, AS_REPORTED)
    assert plan.feasible
    assert not broken(plan)
    assert plan.experts.file > 0


# The report of "cannot pin 322 MiB": the embedding insisted on page-locked memory, of which WSL2 grants little.
@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        (PinnedFacts(asked_bytes=GIB, granted_bytes=0, refusal=REFUSED), "none of that may be used"),
        (PinnedFacts(asked_bytes=GIB, granted_bytes=400 * MIB, refusal=REFUSED), "only 320 MiB of that may be used"),
        (None, "none of that may be used"),
    ],
    ids=["nothing granted", "400 MiB granted", "not measured"],
)
def test_the_embedding_falls_back_to_pageable_memory_and_it_is_said(pinned, words):
    plan = make_plan(rtx_4090_on_wsl2(pinned=pinned), FLASH_NEXT, CUDA)
    assert plan.feasible
    assert plan.line("embedding").tier in (Tier.PAGEABLE, Tier.FILE)
    (sentence,) = (s for s in plan.fallbacks if "embedding" in s)
    assert words in sentence
    assert plan.planned_bytes(Tier.PINNED) <= (pinned.granted_bytes if pinned else 0)


def test_about_one_gib_of_page_locked_memory_holds_the_embedding_and_no_more_is_asked_for():
    granted = PinnedFacts(asked_bytes=2 * GIB, granted_bytes=GIB, refusal=REFUSED)
    plan = make_plan(rtx_4090_on_wsl2(pinned=granted), FLASH_NEXT, CUDA)
    assert plan.line("embedding").tier is Tier.PINNED
    assert plan.planned_bytes(Tier.PINNED) <= GIB * 4 // 5


def test_with_hardly_any_ram_the_embedding_and_the_experts_stay_in_the_file():
    facts = gpu_machine(vram_total=24 * GIB, vram_free=23 * GIB, ram=1500 * MIB, wsl="wsl2", ram_total_bytes=16 * GIB)
    plan = make_plan(facts, FLASH_NEXT, CUDA)
    assert plan.feasible
    assert plan.line("embedding").tier is Tier.FILE
    assert plan.experts.file > 0.99 * plan.experts.total
    assert any("in the model file" in s for s in plan.fallbacks)


def test_a_shortfall_of_vram_offers_changes_in_order_and_each_is_the_smallest():
    facts = gpu_machine(vram_total=8 * GIB, vram_free=6500 * MIB, ram=60 * GIB, display=True)
    options = PlanOptions(device="cuda", max_context=65_536, prefill=512)
    plan = make_plan(facts, FLASH_NEXT, options)
    assert plan.shortfall.line == "kv_cache"
    assert [change.option.split()[0] for change in plan.changes] == ["--vram-reserve-mib", "--kv", "--max-context"]
    assert plan.changes[1].option == "--kv int8"
    context = int(plan.changes[-1].option.split()[1])
    assert context % 256 == 0

    def fits(**changes: object) -> bool:
        return make_plan(facts, FLASH_NEXT, msgspec.structs.replace(options, **changes)).feasible

    assert fits(kv="int8")
    assert fits(max_context=context)
    assert not fits(max_context=context + 256)
    reserve = int(plan.changes[0].option.split()[1])
    assert fits(vram_reserve_bytes=reserve * MIB)
    assert not fits(vram_reserve_bytes=(reserve + 1) * MIB)


def test_the_smallest_card_that_would_do():
    facts = gpu_machine(vram_total=8 * GIB, vram_free=7 * GIB, ram=60 * GIB)
    plan = make_plan(facts, Q3_235B, CUDA)
    (change,) = plan.changes
    vram, ram = (int(n.replace(",", "")) * MIB for n in re.findall(r"([\d,]+) MiB", change.sentence))

    def fits(vram: int, ram: int) -> bool:
        return make_plan(gpu_machine(vram_total=vram, vram_free=vram, ram=ram), Q3_235B, CUDA).feasible

    assert fits(vram, ram)
    assert not fits(vram - MIB, ram)
    assert not fits(vram, ram - MIB)


@pytest.mark.parametrize("kv", ["f16", "f32", "int8"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_kv_caches_formula_gives_its_bytes(kv: str, device: str) -> None:
    """Evaluated as it is printed, the arrays' alignment included; then the memory's rounding."""
    plan = make_plan(LINUX, Q3_30B, PlanOptions(device=device, kv=kv))
    line = plan.line("kv_cache")
    words = re.sub(r"[a-wyz][a-zA-Z]*|KV", "", line.formula.replace(",", ""))
    value = eval(words.replace("x", "*"))
    assert value <= line.bytes < value + 2 * MIB, line.formula
