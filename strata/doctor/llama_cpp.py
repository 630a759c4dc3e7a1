"""A plan as llama.cpp would be told it: flags that place the same bytes, and in words what they cannot say.

What llama.cpp does with its flags is taken from its help and from the buffer sizes it logs; docs/plan.md has the
comparison. Sizes here are those of its log: tensors as stored, and KV cells in whole steps of 256.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from strata.doctor.budgets import TIER_NAMES
from strata.doctor.plan import AllocationPlan, Tier
from strata.doctor.units import MIB, round_up, size
from strata.gguf.model_facts import ModelFacts

CELL_STEP = 256  # KV cells: a context that is no multiple is rounded up
FIRST_BUILD = 10_114  # has --load-mode; older ones have --no-mmap
FIRST_CACHE_BUILD = 11_480  # has --moe-cache-mib
_ALL_LAYERS = 999  # more than any model has, and so the head too
_KV_TYPES = {"f32": "f32", "f16": "f16", "int8": "q8_0"}
_BLOCK_BYTES = {"f32": 128, "f16": 64, "q8_0": 34}  # of 32 values

_LEAST_BATCH = 512  # what it takes by itself: a smaller chunk of ours says nothing of its kernels


class Buffers(msgspec.Struct, frozen=True, kw_only=True):
    """What llama.cpp will log, in bytes."""

    device_model: int  # "model buffer size" of the GPU
    host_model: int  # "model buffer size" of CPU, CPU_Mapped or CUDA_Host, whichever it is
    kv: int  # "KV buffer size"
    state: int  # "RS buffer size": recurrent states of one sequence


class LlamaCpp(msgspec.Struct, frozen=True, kw_only=True):
    """One command line for llama.cpp, and how it falls short of the plan."""

    arguments: tuple[str, ...]  # after the program's name
    buffers: Buffers
    differences: tuple[str, ...]  # sentences


def llama_cpp(plan: AllocationPlan, model: ModelFacts, path: str) -> LlamaCpp:
    """Say a feasible plan in llama.cpp's flags.

    Parameters
    ----------
    plan : AllocationPlan
    model : ModelFacts
        Of the file that the plan is for.
    path : str
        Of that file, as the command is to name it.
    """
    kv, mode = _KV_TYPES[plan.kv], load_mode(plan)
    first = first_layer_in_vram(plan, model)
    cuda = plan.device.backend == "cuda"
    place = ["-sm", "none", "-ngl", str(_ALL_LAYERS)] if cuda else ["--device", "none", "-ngl", "0", "--no-repack"]
    if cuda and first:
        place.append(_experts_flag(first, model))
    if cuda and mode == "none" and not plan.planned_bytes(Tier.PINNED):
        place += ["--no-host", "--no-repack"]
    batch = max(plan.chunk, _LEAST_BATCH)
    numbers = {"-c": plan.context, "-np": 1, "-b": batch, "-ub": batch}
    rest = [f"{flag} {value}" for flag, value in numbers.items()]
    rest += ["-fa on", f"-ctk {kv}", f"-ctv {kv}", f"--load-mode {mode}"]
    return LlamaCpp(
        arguments=("-m", path, *" ".join(place + rest).split()),
        buffers=buffers(model, plan.context, kv, first if cuda else None, batch),
        differences=tuple(_differences(plan, model, first)),
    )


def first_layer_in_vram(plan: AllocationPlan, model: ModelFacts) -> int:
    """Return the fewest first layers whose experts must stay out of VRAM, so that the others fit into the plan's slots.

    llama.cpp puts a layer's experts into VRAM all together, and leaves those of the first layers out.
    """
    if plan.experts.slots == plan.experts.total:
        return 0
    room = sum(line.bytes for line in plan.reservations if line.id.startswith("expert_slots"))
    by_layer = _expert_bytes(model)
    first = model.layers
    while first and room >= by_layer.get(first - 1, 0):
        first -= 1
        room -= by_layer.get(first, 0)
    return first


def buffers(model: ModelFacts, context: int, kv: str, first: int | None, batch: int = _LEAST_BATCH) -> Buffers:
    """Work out the buffers that llama.cpp logs for a model.

    Parameters
    ----------
    context : int
        Tokens, -c.
    kv : str
        llama.cpp's type of keys and values: "f32", "f16" or "q8_0".
    first : int, optional
        First layer whose experts are in VRAM; None when nothing is.
    batch : int
        Tokens, -ub: layers that see a window keep as many cells more.
    """
    by_layer = _expert_bytes(model)
    head_values = model.key_length + model.value_length
    cells = round_up(context, CELL_STEP)
    values = cells * (sum(model.kv_heads) * head_values + model.index_values)
    windowed = sum(model.kv_heads[layer] for layer in model.windowed_layers) * head_values
    values -= windowed * max(cells - round_up(model.window + batch, CELL_STEP), 0)
    read_by_row = model.embedding_table.bytes + model.row_tables.bytes
    head = 0 if model.tied_head and first is None else model.head.bytes  # tied, and in VRAM: it is there twice
    device = 0
    if first is not None:
        device = model.dense.bytes + head + sum(nbytes for layer, nbytes in by_layer.items() if layer >= first)
    whole = model.dense.bytes + head + sum(by_layer.values())
    return Buffers(
        device_model=device,
        host_model=read_by_row + whole - device,
        kv=values * _BLOCK_BYTES[kv] // 32,
        state=model.recurrent_state_bytes,
    )


def load_mode(plan: AllocationPlan) -> str:
    """Return how the host's part of the file is held: mapped where the plan leaves experts in the file, else read."""
    e = plan.experts
    missed_from_file = e.slots < e.total and e.file > 0
    embedding = plan.line("embedding")
    return "mmap" if missed_from_file or embedding is None or embedding.tier is Tier.FILE else "none"


def _expert_bytes(model: ModelFacts) -> dict[int, int]:
    """Bytes of each layer's experts as stored."""
    return {layer: c.experts_per_layer * c.bytes for c in model.expert_classes for layer in c.layers}


def _experts_flag(first: int, model: ModelFacts) -> str:
    return "-cmoe" if first >= model.layers else f"-ncmoe {first}"


def _differences(plan: AllocationPlan, model: ModelFacts, first: int) -> Iterator[str]:
    """Say, a sentence or two each, what the flags cannot."""
    cuda = plan.device.backend == "cuda"
    if not cuda:
        yield "Ready weights: where the plan has float32, llama.cpp computes with the weights as stored."
    if plan.experts.slots < plan.experts.total:
        if not cuda:
            yield f"Expert slots: the plan's {plan.experts.slots:,} have no counterpart."
        elif first:
            yield from _about_slots(plan, model, first)
        yield from _about_host(plan)
    if plan.kv == "int8":
        yield "KV: q8_0 takes 34 bytes for 32 values, the plan's int8 33."
    if plan.context % CELL_STEP:
        yield f"Context: llama.cpp rounds it up to {round_up(plan.context, CELL_STEP):,} tokens."
    if cuda:
        own = [plan.line(id) for id in ("context", "modules", "graphs", "workspace", "logits", "sampler")]
        reserve = next(b.reserve_bytes for b in plan.budgets if b.tier is Tier.VRAM)
        yield (
            "Workspaces: llama.cpp sizes its CUDA context and compute buffers itself, where the plan has "
            f"{size(sum(line.bytes for line in own if line))}; it cannot be told to keep {size(reserve)} free."
        )
        yield f"GPU: where there are several, -mg chooses the one that the plan is for, {plan.device.name}."
    yield f"Builds before {FIRST_BUILD:,} say --no-mmap for --load-mode none, and nothing for --load-mode mmap."


def _about_slots(plan: AllocationPlan, model: ModelFacts, first: int) -> Iterator[str]:
    pool = sum(line.bytes for line in plan.reservations if line.id.startswith("expert_slots"))
    resident = sum(nbytes for layer, nbytes in _expert_bytes(model).items() if layer >= first)
    flag, slots = _experts_flag(first, model), f"{plan.experts.slots:,} slots ({size(pool)})"
    if resident:
        placed = f"{flag} places those of whole layers, {size(resident)} in VRAM where the plan has {slots}"
        yield f"Single experts in VRAM: {placed}, and none moves while it runs."
    else:
        yield f"Single experts in VRAM: {flag} leaves all of them outside, where the plan has {slots}."
    yield (
        f"Builds from {FIRST_CACHE_BUILD:,} on can cache single experts: -cmoe --moe-cache-mib {pool // MIB}"
        + (f" in place of {flag}" if resident else "")
        + " takes the bytes of all slots."
    )
    yield "Staging ring: none; an expert outside VRAM is computed on the CPU, where it lies."


def _about_host(plan: AllocationPlan) -> Iterator[str]:
    """Say how a mix of places on the host comes out in one mode for all."""
    e = plan.experts
    lie = ((e.pinned, Tier.PINNED), (e.pageable, Tier.PAGEABLE), (e.file, Tier.FILE))
    places = [f"{count:,} in {TIER_NAMES[tier]}" for count, tier in lie if count]
    if len(places) < 2 and not (e.pinned and load_mode(plan) == "mmap"):
        return
    what = f"Host: where the plan keeps {', '.join(places)}, llama.cpp"
    if load_mode(plan) == "mmap":
        yield f"{what} maps the whole file; what stays in RAM is up to the page cache, and nothing is page-locked."
    else:
        yield f"{what} page-locks all that it reads, or nothing with --no-host."
