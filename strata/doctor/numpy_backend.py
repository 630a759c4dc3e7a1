"""The numpy backend as the planner sees it: its lines, their sizes, its speeds. One memory, RAM, plays every tier."""

from __future__ import annotations

from copy import copy
from functools import cached_property

from strata.doctor.budgets import numpy_limits
from strata.doctor.candidates import HostChoice
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts, HostFacts
from strata.doctor.host_speeds import file_speed, host_threads, ram_speed
from strata.doctor.lines import Lines, recurrent_state
from strata.doctor.plan import CPU, DeviceRef, PlanOptions, Reservation, SlotClass, Tier
from strata.doctor.request import Request, minimum_slots
from strata.doctor.speed import PROMPT, Speeds, Traffic
from strata.doctor.units import MIB, PAGE, round_up
from strata.errors import UsageError
from strata.gguf import footprint
from strata.gguf.model_facts import ModelFacts

# Measured in fresh processes: 47 MiB with numpy, gguf, tokenizers, jinja2, rich and typer loaded; at its peak 0.75
# to 0.85 KiB a token while a byte-pair tokenizer is built; 33.4 MiB that OpenBLAS keeps for each thread at work.
_CONTEXT_BASE = 64 * MIB
_CONTEXT_PER_THREAD = 34 * MIB
_CONTEXT_PER_TOKEN = 1024

# Measured on two cores of an AMD EPYC with nothing else running, and held to at 55 to 110 %: decoding came to 78 % at
# two widths, prompts of 512 to 4,000 tokens to 76 to 94 %. See docs/plan.md.
_EFFICIENCY = 0.55
_WEIGHTS_PER_CORE_S = 45e9
_LAYER_S = 227e-6  # the interpreter's part of a step
_EXPERT_S = 150e-6  # prompts of 19 and 37 tokens took 96 and 121 ms, of which the weights' bytes and products 45 and 67
_ATTENTION = 1.5  # what a product of attention costs, in products of weights: it works in small blocks
# Ready bytes made of stored blocks per second, on one core. Q4_1 gave 0.4 to 1.5 GB/s, 1.4 in a first
# prompt of the demo with nothing else running: glibc may or may not give its temporaries back to the system each time.
_READY = {"Q8_0": 3.0e9, "F16": 1.9e9, "Q4_0": 1.8e9, "Q2_K": 1.5e9, "Q4_K": 1.4e9, "Q6_K": 1.3e9, "BF16": 1.15e9}
_READY |= {"Q3_K": 1.1e9, "Q5_0": 1.05e9, "Q5_1": 1.05e9, "Q5_K": 0.95e9, "IQ4_NL": 0.65e9, "MXFP4": 0.6e9}
_READY |= {"IQ4_XS": 0.5e9, "Q4_1": 1.4e9, "IQ1_S": 0.5e9, "IQ1_M": 0.45e9, "F32": 4e9}
_READY_OTHERWISE = 0.36e9  # the IQ2 and IQ3 types


class NumpyBackend:
    """Implements `candidates.Backend`."""

    kv_types: tuple[str, ...] = ("f32", "f16", "int8")
    measured_lines: tuple[str, ...] = ()
    chunks: tuple[int, ...] = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    host_choices: tuple[HostChoice, ...] = (
        HostChoice(Tier.PAGEABLE, Tier.PAGEABLE),
        HostChoice(Tier.FILE, Tier.PAGEABLE),
    )

    def __init__(self, facts: Facts, model: ModelFacts, options: PlanOptions) -> None:
        _refuse_what_only_a_gpu_has(options)
        self.device = DeviceRef(backend="numpy", id=CPU, name=(facts.host.value or HostFacts()).cpu_model or "CPU")
        self.minimum_slots = minimum_slots(model)
        self.experts = ExpertSizes.of(model)
        self.limits = numpy_limits(facts, options)
        self.threads, self.notes = host_threads(facts)
        self._model = model
        self._lines = Lines(device=CPU, step=PAGE, alignment=footprint.SLOT_ALIGNMENT)
        self._slot_bytes = footprint.expert_slot_size(model).bytes
        self._facts = facts
        self._known_lines: dict[tuple[int, str, int, int, HostChoice], tuple[Reservation, ...]] = {}

    def among(self, facts: Facts, options: PlanOptions) -> NumpyBackend:
        """See `candidates.Backend`."""
        _refuse_what_only_a_gpu_has(options)
        other = copy(self)  # with what is known of lines: sizes do not depend on budgets
        other.limits = numpy_limits(facts, options)
        return other

    @cached_property
    def speeds(self) -> Speeds:
        """See `candidates.Backend`. Nobody asks while only looking for what fits."""
        return _speeds(self._facts, self._model, self.threads)

    def fixed_lines(self, request: Request, chunk: int, host: HostChoice) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        asked = request.context, request.kv, request.threads, chunk, host
        if asked not in self._known_lines:  # the same few are asked for over and over, above all in search of changes
            self._known_lines[asked] = self._lines_of(request, chunk) + self._host_lines(host)
        return self._known_lines[asked]

    def _host_lines(self, host: HostChoice) -> tuple[Reservation, ...]:
        ring = footprint.Size(self.experts.largest_stored_bytes, "the largest expert as stored")
        lines = self._lines.host_lines(self._model, host.embedding, host.staging, ring)
        return tuple(line for line in lines if line.bytes)

    def _lines_of(self, request: Request, chunk: int) -> tuple[Reservation, ...]:
        """Make the lines that do not depend on where the host's lie."""
        m = self._model
        work = footprint.workspace(m, chunk, request.kv, request.threads)
        kv_arrays = footprint.kv_arrays(request.kv) * sum(groups > 0 for groups in m.kv_heads)
        context = footprint.Size(
            _CONTEXT_BASE + _CONTEXT_PER_THREAD * request.threads + _CONTEXT_PER_TOKEN * m.vocab,
            f"64 MiB + {request.threads} threads x 34 MiB + {m.vocab:,} tokens x 1 KiB",
        )
        logits = footprint.logits(m)
        line = self._lines.line
        lines = (
            line("context", "Python, libraries, tokenizer", Tier.VRAM, context),
            line("dense", "dense weights, float32", Tier.VRAM, footprint.dense_size(m), m.dense.tensors),
            line("head", "output head, float32", Tier.VRAM, footprint.head_size(m)),
            line(
                "kv_cache",
                f"KV cache, {request.kv}",
                Tier.VRAM,
                footprint.kv_cache_size(m, request.context, request.kv),
                kv_arrays,
            ),
            line(
                "workspace",
                "activations of a prompt chunk",
                Tier.VRAM,
                footprint.workspace_size(m, chunk, request.kv, request.threads),
                len(work),
            ),
            line("recurrent_state", "recurrent state, float32", Tier.VRAM, recurrent_state(m)),
            line("logits", "logits of one token", Tier.VRAM, footprint.Size(logits.nbytes, logits.formula)),
            line("temporaries", "NumPy's own temporaries", Tier.VRAM, footprint.temporaries_size(m, chunk)),
        )
        return tuple(line for line in lines if line.bytes)

    def slot_bytes(self, slots: int) -> int:
        """See `candidates.Backend`."""
        return round_up(slots * self._slot_bytes, PAGE)

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        e = self.experts
        if not e.total:
            return ()
        slot = footprint.expert_slot_size(self._model)
        slots_size = footprint.Size(slots * slot.bytes, f"{slots:,} of {e.total:,} experts x {slot.formula}")
        lines = (
            self._lines.line("expert_slots", "experts ready to run", Tier.VRAM, slots_size),
            *self._lines.stored_experts(e, pinned, pageable),
        )
        return tuple(line for line in lines if line.bytes)

    def slot_classes(self, slots: int) -> tuple[SlotClass, ...]:
        """See `candidates.Backend`. Ready experts are float32 and so of one size."""
        layers = tuple(sorted(layer for c in self.experts.classes for layer in c.layers))
        return (SlotClass(line="expert_slots", layers=layers, slots=slots, slot_bytes=self._slot_bytes),)

    def traffic(self, request: Request, prompt: int = PROMPT) -> Traffic:
        """See `candidates.Backend`."""
        m, e = self._model, self.experts
        prompt = min(prompt, request.context)
        expert_weights = max((c.elements for c in e.classes), default=0)
        attention = m.heads * (m.key_length + m.value_length) * sum(groups > 0 for groups in m.kv_heads)
        seen = prompt / 2  # tokens that one looks back on
        per_token = m.dense.elements + e.layers * m.top_k * expert_weights + round(_ATTENTION * seen * attention)
        return Traffic(
            dense_bytes=4 * m.dense.elements,
            head_bytes=4 * m.head.elements,
            kv_bytes=footprint.kv_cache_size(m, prompt, request.kv).bytes,
            embedding_row_bytes=m.embedding_table.bytes // max(m.vocab, 1),
            prompt=prompt,
            layers=m.layers,
            expert_layers=e.layers,
            experts_per_layer=m.experts,
            top_k=m.top_k,
            ready_bytes=self._slot_bytes if e.total else 0,
            stored_bytes=e.stored_bytes // max(e.total, 1),
            weights_per_token=per_token,
            answer_weights=0,  # products of single tokens take no longer than reading the weights
        )


def _speeds(facts: Facts, model: ModelFacts, threads: int) -> Speeds:
    """Take measured bandwidths from the facts, and say which were assumed."""
    ram, ram_basis = ram_speed(facts)
    file, file_basis = file_speed(facts)
    types = [kind for c in model.expert_classes for kind in c.types for _ in c.layers]
    slowness = sum(1 / _READY.get(kind, _READY_OTHERWISE) for kind in types) / max(len(types), 1)
    return Speeds(
        vram=ram,
        pinned=ram,
        pageable=ram / 2,  # it is copied to the staging ring first
        file=file,
        unstaged=ram,
        ready=1 / slowness if types else float("inf"),
        weights=_WEIGHTS_PER_CORE_S * threads,
        call_tokens=0,
        prompt_layer_s=0.0,
        products=float("inf"),
        layer_s=_LAYER_S,
        call_s=0.0,
        expert_s=_EXPERT_S,
        look_s=0.0,
        efficiency=_EFFICIENCY,
        basis=(ram_basis, file_basis),
    )


def _refuse_what_only_a_gpu_has(options: PlanOptions) -> None:
    if options.vram_reserve_bytes is not None:
        raise UsageError(
            "leave VRAM free (--vram-reserve-mib)",
            "the plan is for the CPU, which has none",
            "Use --ram-budget to bound what is taken, or --device cuda",
        )
