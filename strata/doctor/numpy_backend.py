"""The numpy backend as the planner sees it: its lines, their sizes and its speeds. One memory, RAM, plays every tier."""

from __future__ import annotations

from strata.doctor.budgets import numpy_limits
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts, HostFacts
from strata.doctor.plan import CPU, HOST, DeviceRef, PlanOptions, Reservation, Tier
from strata.doctor.request import Request, minimum_slots
from strata.doctor.speed import Speeds, Traffic
from strata.doctor.units import MIB, round_up
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts

PAGE = 4096  # RAM is handed out in pages, and each line is taken as one block

# Measured in fresh processes: 47 MiB with numpy, gguf, tokenizers, jinja2, rich and typer loaded and BLAS used, and at
# its peak 0.75 to 0.85 KiB a token while a byte-pair tokenizer is built. The rest is margin for the threads' own memory.
_CONTEXT_BASE = 128 * MIB
_CONTEXT_PER_TOKEN = 1024

# Where facts hold no measurement. Ready floats per second: gguf.quants on one core, between IQ3_S (0.09 GB/s) and
# Q8_0 (1.1 GB/s). The rest is what a desktop with two memory channels and a SATA disk does.
_RAM_BYTES_PER_S = 20e9
_FILE_BYTES_PER_S = 0.5e9
_READY_BYTES_PER_S = 0.25e9
_WEIGHTS_PER_CORE_S = 10e9
_LAYER_S = 200e-6


class NumpyBackend:
    """Implements `candidates.Backend`."""

    kv_types = ("f32", "f16")
    embedding_tiers = (Tier.PAGEABLE, Tier.FILE)

    def __init__(self, facts: Facts, model: ModelFacts, options: PlanOptions) -> None:
        if options.vram_reserve_bytes is not None:
            raise UsageError(
                "leave VRAM free (--vram-reserve-mib)",
                "the plan is for the CPU, which has none",
                "Use --ram-budget to bound what is taken, or --device cuda",
            )
        self.device = DeviceRef(backend="numpy", id=CPU, name=(facts.host.value or HostFacts()).cpu_model or "CPU")
        self.minimum_slots = minimum_slots(model)
        self.experts = ExpertSizes.of(model)
        self.limits = numpy_limits(facts, options)
        self.notes: tuple[str, ...] = ()
        self._model = model
        self._slot_bytes = 4 * max((c.elements for c in model.expert_classes), default=0)
        self.speeds = _speeds(facts)

    def fixed_lines(self, request: Request, chunk: int, embedding: Tier) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        m = self._model
        cells = sum(m.kv_heads) * (m.key_length + m.value_length)
        kv_size = 2 if request.kv == "f16" else 4
        lines = [
            _line(
                "context",
                "Python, libraries and tokenizer",
                Tier.VRAM,
                _CONTEXT_BASE + _CONTEXT_PER_TOKEN * m.vocab,
                f"128 MiB + {m.vocab:,} tokens x 1 KiB",
            ),
            _line("dense", "dense weights", Tier.VRAM, 4 * m.dense.elements, f"{m.dense.elements:,} weights x 4 bytes"),
            _line("head", "output head", Tier.VRAM, 4 * m.head.elements, f"{m.head.elements:,} weights x 4 bytes"),
            _line(
                "kv_cache",
                f"KV cache, {request.kv}",
                Tier.VRAM,
                request.context * cells * kv_size,
                f"{request.context:,} tokens x {cells:,} values x {kv_size} bytes",
            ),
        ]
        return tuple(line for line in lines if line.bytes)

    def slot_bytes(self, slots: int) -> int:
        """See `candidates.Backend`."""
        return round_up(slots * self._slot_bytes, PAGE)

    def stored_bytes(self, experts: int) -> int:
        """See `candidates.Backend`."""
        return round_up(self.experts.most_bytes(experts), PAGE)

    def expert_lines(self, slots: int, pinned: int, pageable: int) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        e = self.experts
        if not e.total:
            return ()
        in_file = e.total - pinned - pageable
        lines = [
            _line(
                "expert_slots",
                "experts ready to run",
                Tier.VRAM,
                self.slot_bytes(slots),
                f"{slots:,} of {e.total:,} experts x {self._slot_bytes // 4:,} weights x 4 bytes",
            ),
            _line(
                "experts_pageable",
                "experts as stored",
                Tier.PAGEABLE,
                self.stored_bytes(pageable),
                f"{pageable:,} experts of at most {e.largest_stored_bytes:,} bytes",
            ),
            _line(
                "experts_pinned",
                "experts as stored",
                Tier.PINNED,
                self.stored_bytes(pinned),
                f"{pinned:,} experts of at most {e.largest_stored_bytes:,} bytes",
            ),
            _line(
                "experts_file",
                "experts read from the model file when missed",
                Tier.FILE,
                round(e.stored_bytes * in_file / e.total),
                f"{in_file:,} of {e.total:,} experts",
            ),
        ]
        return tuple(line for line in lines if line.bytes)

    def traffic(self, request: Request) -> Traffic:
        """See `candidates.Backend`."""
        m, e = self._model, self.experts
        cells = sum(m.kv_heads) * (m.key_length + m.value_length)
        per_token = m.dense.elements + m.head.elements + e.layers * m.top_k * self._slot_bytes // 4
        return Traffic(
            dense_bytes=4 * m.dense.elements,
            head_bytes=4 * m.head.elements,
            kv_bytes=request.context // 2 * cells * (2 if request.kv == "f16" else 4),
            embedding_row_bytes=m.embedding_table.bytes // max(m.vocab, 1),
            layers=m.layers,
            expert_layers=e.layers,
            experts_per_layer=m.experts,
            top_k=m.top_k,
            ready_bytes=self._slot_bytes,
            stored_bytes=e.stored_bytes // max(e.total, 1),
            weights_per_token=per_token,
        )


def _line(id: str, what: str, tier: Tier, nbytes: int, formula: str) -> Reservation:
    if tier is not Tier.FILE:
        nbytes = round_up(nbytes, PAGE)
    return Reservation(
        id=id, what=what, tier=tier, device=CPU if tier is Tier.VRAM else HOST, bytes=nbytes, formula=formula
    )


def _speeds(facts: Facts) -> Speeds:
    """Take measured bandwidths from the facts, and say which were assumed."""
    basis = []
    measured = facts.speed.value
    if measured and measured.ram_read_bytes_per_s:
        ram = max(measured.ram_read_bytes_per_s.values())
        basis.append(f"RAM reads at {ram / 1e9:.1f} GB/s, measured.")
    else:
        ram = _RAM_BYTES_PER_S
        basis.append(f"RAM is assumed to read at {ram / 1e9:.0f} GB/s; it was not measured.")
    disk = facts.disk.value
    if disk and disk.read_bytes_per_s:
        file = disk.read_bytes_per_s
        basis.append(f"The model file reads at {file / 1e9:.2f} GB/s, measured.")
    else:
        file = _FILE_BYTES_PER_S
        basis.append(f"The model file is assumed to read at {file / 1e9:.1f} GB/s; it was not measured.")
    host = facts.host.value or HostFacts()
    cores = host.cpu_physical or 1
    return Speeds(
        vram=ram,
        pinned=ram,
        pageable=ram,
        file=file,
        ready=_READY_BYTES_PER_S,
        weights=_WEIGHTS_PER_CORE_S * cores,
        layer_s=_LAYER_S,
        efficiency=0.5,
        basis=tuple(basis),
    )
