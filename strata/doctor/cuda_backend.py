"""The CUDA backend as the planner sees it: weights and slots keep their stored form, and each memory is its own."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from math import sqrt

from strata.doctor.candidates import HostChoice
from strata.doctor.cards import Card, known_card
from strata.doctor.cuda_budgets import cuda_limits
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts
from strata.doctor.gpus import Gpu, choose_gpu
from strata.doctor.host_speeds import file_speed, host_threads, ram_speed
from strata.doctor.lines import Lines, recurrent_state
from strata.doctor.plan import DeviceRef, PlanOptions, Reservation, SlotClass, Tier
from strata.doctor.request import Request, minimum_slots
from strata.doctor.speed import PROMPT, Speeds, Traffic
from strata.doctor.units import MIB, round_up, size
from strata.gguf import cuda_footprint, footprint
from strata.gguf.cuda_prompt_footprint import reads_prompts
from strata.gguf.footprint import Size
from strata.gguf.model_facts import ModelFacts

DEVICE_STEP = 2 * MIB  # the driver maps device memory in pieces of 2 MiB

# Where nothing was measured, in VRAM: reports put the context between 100 and 550 MiB.
CONTEXT = 512 * MIB
MODULES = 64 * MIB  # every kernel of this backend, loaded eagerly
GRAPHS = 64 * MIB  # captured graphs and what libraries keep
_MORE = 32 * MIB  # of either than a run took: with experts in pageable RAM a shape is a graph for each layer
# In RAM: the interpreter, CuPy, the CUDA libraries' host side, and a tokenizer (see the numpy backend's figure).
PROCESS = 768 * MIB
PROCESS_PER_TOKEN = 1024

_UNKNOWN_BANDWIDTH, _UNKNOWN_LINK, _UNKNOWN_TFLOPS, _UNKNOWN_FP32 = 400e9, 12e9, 40, 20
# As measured on an H200 (docs/benchmarks.md), for a model of 48 layers and one of 30 narrow ones:
_LAYER_S = 18e-6  # six kernels of a replayed graph, 3 us each until they are under way
_CALL_S = 100e-6
_LOOK_S = 27e-6
# What the kernels for a few tokens take of a lane of the multiprocessors for each weight of a token: unpacking, staging
# and multiplying. Attention takes a little less than half of it for a value of a cached cell.
_INSTRUCTIONS_PER_WEIGHT = 12
_ATTENTION = 0.45
_EFFICIENCY = 0.55
_REACHED = 0.85  # of the published bandwidth; a copy within an H200 reaches 0.82
_LANES = {"7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64}  # by compute capability, for float32
_USUAL_LANES = 128
# Weights multiplied per second in grouped products of quantised experts, by the root of the tensor cores' TFLOP/s:
# fitted to prompts read at 8,655 tokens/s by an H200 and 2,000 to 2,600 by an RTX 3090, each 3e9 weights a token.
_WEIGHTS_PER_ROOT_TFLOPS = 1.25e12

_PROMPT_LAYER_S = 0.5e-3  # 16 kernels launched one by one: 19 to 31 ms for 48 layers, measured

_PROMPT_CHUNKS = (
    2048,
    1024,
    512,
    256,
    128,
    64,
)  # for the kernels that run many tokens, given that all experts have slots


class CudaBackend:
    """Implements `candidates.Backend`."""

    kv_types: tuple[str, ...] = ("f16", "int8", "f32")
    chunks: tuple[int, ...] = (8, 4, 2, 1)  # what the decode kernels take at once
    host_choices: tuple[HostChoice, ...] = (
        HostChoice(Tier.PINNED, Tier.PINNED),
        HostChoice(Tier.PAGEABLE, Tier.PINNED),
        HostChoice(Tier.FILE, Tier.PINNED),
        HostChoice(Tier.PAGEABLE, Tier.PAGEABLE),
        HostChoice(Tier.FILE, Tier.PAGEABLE),
    )
    measured_lines: tuple[str, ...] = ("context", "modules", "graphs")

    def __init__(self, facts: Facts, model: ModelFacts, options: PlanOptions) -> None:
        self._gpu = choose_gpu(facts, options.gpu)
        self._model = model
        if reads_prompts(model):
            self.chunks = (*_PROMPT_CHUNKS, *self.chunks)
        if model.tied_head:  # which is the embedding, and on the device
            self.host_choices = tuple(choice for choice in self.host_choices if choice.embedding is Tier.FILE)
        self.device = DeviceRef(backend="cuda", id=self._gpu.uuid, name=self._gpu.name)
        self.experts = ExpertSizes.of(model)
        self.minimum_slots = minimum_slots(model, len(self.experts.classes))
        self.limits = cuda_limits(facts, self._gpu, options)
        self.threads, thread_notes = host_threads(facts)
        self._facts = facts
        self._known_lines: dict[tuple[int, str, int, HostChoice], tuple[Reservation, ...]] = {}
        self._lines = Lines(device=self._gpu.uuid, step=DEVICE_STEP, alignment=cuda_footprint.ARRAY_ALIGNMENT)
        self._slot_bytes = tuple(cuda_footprint.expert_slot_bytes(c.bytes) for c in self.experts.classes)
        self._pool_bytes: dict[int, int] = {}
        self._context, context_notes = _context(self._gpu)
        self.notes = (*context_notes, *thread_notes)

    @cached_property
    def speeds(self) -> Speeds:
        """See `candidates.Backend`. Nobody asks while only looking for what fits."""
        return _speeds(self._facts, self._gpu)

    def among(self, facts: Facts, options: PlanOptions) -> CudaBackend:
        """See `candidates.Backend`."""
        other = copy(self)  # with what is known of lines and pools: sizes do not depend on budgets
        other.limits = cuda_limits(facts, choose_gpu(facts, options.gpu), options)
        return other

    def fixed_lines(self, request: Request, chunk: int, host: HostChoice) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        asked = request.context, request.kv, chunk, host
        if asked not in self._known_lines:  # the same few are asked for over and over, above all in search of changes
            self._known_lines[asked] = self._lines_of(request, chunk) + self._host_lines(chunk, host)
        return self._known_lines[asked]

    def _host_lines(self, chunk: int, host: HostChoice) -> tuple[Reservation, ...]:
        # Two layers' worth of misses: one on its way while the other is copied from.
        ring = Size(
            2 * self._model.top_k * self.experts.largest_stored_bytes,
            f"2 x {self._model.top_k} experts x {self.experts.largest_stored_bytes:,} bytes",
        )
        io = self._lines.line(
            "host_io",
            "tokens in, logits out, file pieces",
            host.staging,
            cuda_footprint.host_io_size(self._model, chunk),
            len(cuda_footprint.host_io(self._model, chunk)),
        )
        lines = (io, *self._lines.host_lines(self._model, host.embedding, host.staging, ring))
        return tuple(line for line in lines if line.bytes)

    def _lines_of(self, request: Request, chunk: int) -> tuple[Reservation, ...]:
        """Make the lines that do not depend on where the host's lie."""
        m, line = self._model, self._lines.line
        process = Size(PROCESS + PROCESS_PER_TOKEN * m.vocab, f"{size(PROCESS)} + {m.vocab:,} tokens x 1 KiB")
        lines = (
            line("context", "CUDA context", Tier.VRAM, self._context),
            line("modules", "kernels", Tier.VRAM, self._overhead(MODULES, "modules_bytes")),
            line("dense", "dense weights, as stored", Tier.VRAM, cuda_footprint.dense_size(m)),
            line("head", "output head, as stored", Tier.VRAM, Size(m.head.bytes, f"{m.head.elements:,} weights")),
            line(
                "kv_cache",
                f"KV cache, {request.kv}",
                Tier.VRAM,
                cuda_footprint.kv_cache_size(m, request.context, request.kv),
                footprint.kv_arrays(request.kv) * m.layers,
            ),
            line("recurrent_state", "recurrent state, float32", Tier.VRAM, recurrent_state(m)),
            line(
                "workspace",
                "a call's activations",
                Tier.VRAM,
                cuda_footprint.workspace_size(m, chunk),
                len(cuda_footprint.workspace(m, chunk)),
            ),
            line("logits", "logits of one token", Tier.VRAM, Size(4 * m.vocab, f"{m.vocab:,} tokens x 4")),
            line("graphs", "captured graphs, libraries", Tier.VRAM, self._overhead(GRAPHS, "graphs_bytes")),
            line("process", "Python, libraries, tokenizer", Tier.PAGEABLE, process),
        )
        return tuple(line for line in lines if line.bytes)

    def _overhead(self, assumed: int, name: str) -> Size:
        """What the last run here took, and some more: the next model of its architecture may have more layers."""
        overheads = self._gpu.cuda.overheads if self._gpu.cuda else {}
        found = overheads.get(self._model.architecture)
        if found is None:
            return Size(assumed, "assumed")
        nbytes: int = getattr(found, name)
        return Size(nbytes + _MORE, f"{size(nbytes)} measured in the last run + {size(_MORE)}")

    def slot_bytes(self, slots: int) -> int:
        """See `candidates.Backend`."""
        if slots not in self._pool_bytes:  # asked for the same few numbers over and over
            pools = zip(self._spread(slots), self._slot_bytes, strict=True)
            self._pool_bytes[slots] = sum(round_up(count * nbytes, DEVICE_STEP) for count, nbytes in pools)
        return self._pool_bytes[slots]

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        if not self.experts.total:
            return ()
        pools = [
            self._lines.line(
                pool.line,
                f"expert slots, {'/'.join(dict.fromkeys(c.types))}",
                Tier.VRAM,
                Size(pool.slots * pool.slot_bytes, f"{pool.slots:,} slots x {pool.slot_bytes:,} bytes"),
            )
            for pool, c in zip(self.slot_classes(slots), self.experts.classes, strict=True)
        ]
        lines = (*pools, *self._lines.stored_experts(self.experts, pinned, pageable))
        return tuple(line for line in lines if line.bytes)

    def slot_classes(self, slots: int) -> tuple[SlotClass, ...]:
        """See `candidates.Backend`."""
        one = len(self.experts.classes) == 1
        return tuple(
            SlotClass(
                line="expert_slots" if one else f"expert_slots.{i}", layers=c.layers, slots=count, slot_bytes=nbytes
            )
            for i, (c, count, nbytes) in enumerate(
                zip(self.experts.classes, self._spread(slots), self._slot_bytes, strict=True)
            )
        )

    def traffic(self, request: Request, prompt: int = PROMPT) -> Traffic:
        """See `candidates.Backend`."""
        m, e = self._model, self.experts
        prompt = min(prompt, request.context)
        stored = e.stored_bytes // max(e.total, 1)
        weights = m.dense.elements + e.layers * m.top_k * max((c.elements for c in e.classes), default=0)
        a_cell = _ATTENTION * m.heads * (m.key_length + m.value_length) * sum(groups > 0 for groups in m.kv_heads)
        return Traffic(
            dense_bytes=m.dense.bytes,
            head_bytes=m.head.bytes,
            kv_bytes=cuda_footprint.kv_cache_size(m, prompt, request.kv).bytes,
            embedding_row_bytes=m.embedding_table.bytes // max(m.vocab, 1),
            prompt=prompt,
            layers=m.layers,
            expert_layers=e.layers,
            experts_per_layer=m.experts,
            top_k=m.top_k,
            ready_bytes=stored,
            stored_bytes=stored,
            weights_per_token=weights + round(a_cell * prompt / 2),
            answer_weights=weights + m.head.elements + round(a_cell * prompt),
        )

    def _spread(self, slots: int) -> tuple[int, ...]:
        least = self.minimum_slots // max(len(self.experts.classes), 1)
        return self.experts.spread(slots, least)


def _context(gpu: Gpu) -> tuple[Size, tuple[str, ...]]:
    if gpu.cuda and gpu.cuda.context_bytes is not None:
        return Size(gpu.cuda.context_bytes, "measured"), ()
    note = f"The CUDA context was not measured; {size(CONTEXT)} are charged for it."
    return Size(CONTEXT, "assumed"), (note,)


def _lanes(gpu: Gpu, card: Card | None) -> float:
    """Instructions per second of all lanes: by what the card says of itself, else as published, else assumed."""
    processors = gpu.cuda.attributes.get("MultiProcessorCount") if gpu.cuda and gpu.cuda.attributes else None
    clock = gpu.nvml.sm_clock_max_mhz if gpu.nvml else None
    if processors and clock:
        capability = (gpu.cuda and gpu.cuda.compute_capability) or ""
        return processors * _LANES.get(capability, _USUAL_LANES) * clock * 1e6
    return (card.fp32_tflops if card else _UNKNOWN_FP32) / 2 * 1e12


def _speeds(facts: Facts, gpu: Gpu) -> Speeds:
    """Take bandwidths as measured, else as published for the card, else assumed; and say which."""
    card, measured = known_card(gpu.name), facts.speed.value
    basis = []

    def pick(what: str, found: float | None, tabled: float | None, assumed: float) -> float:
        speed, how = (found, "measured") if found else (tabled, "published") if tabled else (assumed, "assumed")
        basis.append(f"{what} {speed / 1e9:,.0f} GB/s, {how}.")
        return speed

    copied = measured.device_copy_bytes_per_s if measured else None
    vram = pick("VRAM reads at", 2 * copied if copied else None, card.bandwidth if card else None, _UNKNOWN_BANDWIDTH)
    if not copied:
        vram *= _REACHED
        basis.append(f"Of VRAM's bandwidth kernels are taken to reach {_REACHED:.0%}.")
    link = pick(
        "Page-locked memory is copied at",
        measured.h2d_pinned_bytes_per_s if measured else None,
        card.link if card else None,
        _UNKNOWN_LINK,
    )
    ram, ram_basis = ram_speed(facts)
    file, file_basis = file_speed(facts)
    staged = max(measured.h2d_staged_bytes_per_s.values(), default=None) if measured else None
    unstaged = max(measured.h2d_pageable_bytes_per_s.values(), default=None) if measured else None
    pageable = staged or min(link, ram / 2)  # read and written once on the way to the ring
    return Speeds(
        vram=vram,
        pinned=link,
        pageable=pageable,
        file=file,
        unstaged=unstaged or min(link / 4, pageable / 2),
        ready=float("inf"),
        weights=_WEIGHTS_PER_ROOT_TFLOPS * sqrt(card.tensor_tflops if card else _UNKNOWN_TFLOPS),
        call_tokens=cuda_footprint.CALL_TOKENS,
        products=_lanes(gpu, card) / _INSTRUCTIONS_PER_WEIGHT,
        layer_s=_LAYER_S,
        prompt_layer_s=_PROMPT_LAYER_S,
        call_s=_CALL_S,
        expert_s=0.0,
        look_s=_LOOK_S,
        efficiency=_EFFICIENCY,
        basis=(*basis, ram_basis, file_basis),
    )
