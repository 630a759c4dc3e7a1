"""The numpy backend as the planner sees it: its lines, their sizes, its speeds. One memory, RAM, plays every tier."""

from __future__ import annotations

from strata.doctor.budgets import numpy_limits
from strata.doctor.experts import ExpertSizes
from strata.doctor.facts import Facts, HostFacts
from strata.doctor.plan import CPU, HOST, DeviceRef, PlanOptions, Reservation, Tier
from strata.doctor.request import Request, minimum_slots
from strata.doctor.speed import Speeds, Traffic
from strata.doctor.units import MIB, round_up, size
from strata.errors import UsageError
from strata.gguf import footprint
from strata.gguf.model_facts import ModelFacts, TensorGroup

PAGE = 4096  # RAM is handed out in pages, and each line is taken as one block

# Measured in fresh processes: 47 MiB with numpy, gguf, tokenizers, jinja2, rich and typer loaded and BLAS used, and
# at its peak 0.75 to 0.85 KiB a token while a byte-pair tokenizer is built. The rest is margin for the threads' own.
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

    kv_types: tuple[str, ...] = ("f32", "f16")
    embedding_tiers: tuple[Tier, ...] = (Tier.PAGEABLE, Tier.FILE)

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
        self.threads, self.notes = _threads(facts)
        self._model = model
        self._slot_bytes = footprint.expert_slot_size(model).bytes
        self.speeds = _speeds(facts)

    def fixed_lines(self, request: Request, chunk: int, embedding: Tier) -> tuple[Reservation, ...]:
        """See `candidates.Backend`."""
        m = self._model
        work = footprint.workspace(m, chunk, request.kv, self.threads)
        kv_arrays = 2 * sum(groups > 0 for groups in m.kv_heads)
        context = footprint.Size(
            _CONTEXT_BASE + _CONTEXT_PER_TOKEN * m.vocab, f"{size(_CONTEXT_BASE)} + {m.vocab:,} tokens x 1 KiB"
        )
        scratch = footprint.Size(footprint.DEQUANTISE_TEMPORARY_BYTES, "the most one dequantisation allocates")
        logits = footprint.logits(m)
        lines = [
            _line("context", "Python, libraries, tokenizer", Tier.VRAM, context),
            _line("dense", "dense weights, float32", Tier.VRAM, footprint.dense_size(m), m.dense.tensors),
            _line("head", "output head, float32", Tier.VRAM, footprint.head_size(m)),
            _line(
                "kv_cache",
                f"KV cache, {request.kv}",
                Tier.VRAM,
                footprint.kv_cache_size(m, request.context, request.kv),
                kv_arrays,
            ),
            _line(
                "workspace",
                "activations of a prompt chunk",
                Tier.VRAM,
                footprint.workspace_size(m, chunk, request.kv, self.threads),
                len(work),
            ),
            _line("logits", "logits of one token", Tier.VRAM, footprint.Size(logits.nbytes, logits.formula)),
            _line("dequant_scratch", "dequantisation", Tier.VRAM, scratch),
            _line("embedding", "token embedding, as stored", embedding, _stored(m.embedding_table)),
        ]
        if self.experts.total:
            one = footprint.Size(self.experts.largest_stored_bytes, "the largest expert as stored")
            lines.append(_line("staging_ring", "an expert on its way to a slot", Tier.PAGEABLE, one))
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
        slot = footprint.expert_slot_size(self._model)
        stored = f"experts of at most {e.largest_stored_bytes:,} bytes"
        file = footprint.Size(round(e.stored_bytes * in_file / e.total), f"{in_file:,} of {e.total:,} experts")
        lines = [
            _line(
                "expert_slots",
                "experts ready to run",
                Tier.VRAM,
                footprint.Size(slots * slot.bytes, f"{slots:,} of {e.total:,} experts x {slot.formula}"),
            ),
            _line(
                "experts_pageable",
                "experts as stored",
                Tier.PAGEABLE,
                footprint.Size(e.most_bytes(pageable), f"{pageable:,} {stored}"),
            ),
            _line(
                "experts_pinned",
                "experts as stored",
                Tier.PINNED,
                footprint.Size(e.most_bytes(pinned), f"{pinned:,} {stored}"),
            ),
            _line("experts_file", "experts read from the file when missed", Tier.FILE, file),
        ]
        return tuple(line for line in lines if line.bytes)

    def traffic(self, request: Request) -> Traffic:
        """See `candidates.Backend`."""
        m, e = self._model, self.experts
        expert_weights = max((c.elements for c in e.classes), default=0)
        per_token = m.dense.elements + m.head.elements + e.layers * m.top_k * expert_weights
        return Traffic(
            dense_bytes=4 * m.dense.elements,
            head_bytes=4 * m.head.elements,
            kv_bytes=footprint.kv_cache_size(m, request.context, request.kv).bytes // 2,
            embedding_row_bytes=m.embedding_table.bytes // max(m.vocab, 1),
            layers=m.layers,
            expert_layers=e.layers,
            experts_per_layer=m.experts,
            top_k=m.top_k,
            ready_bytes=self._slot_bytes if e.total else 0,
            stored_bytes=e.stored_bytes // max(e.total, 1),
            weights_per_token=per_token,
        )


def _stored(group: TensorGroup) -> footprint.Size:
    return footprint.Size(group.bytes, f"{group.elements} weights as stored")


def _line(id: str, what: str, tier: Tier, size: footprint.Size, arrays: int = 1) -> Reservation:
    """Make a line that holds `size` in so many arrays, each on a cache line, rounded up to whole pages."""
    nbytes = size.bytes
    if tier is not Tier.FILE and nbytes:
        nbytes = round_up(nbytes + (arrays - 1) * footprint.SLOT_ALIGNMENT, PAGE)
    return Reservation(
        id=id, what=what, tier=tier, device=CPU if tier is Tier.VRAM else HOST, bytes=nbytes, formula=size.formula
    )


def _threads(facts: Facts) -> tuple[int, tuple[str, ...]]:
    """How many threads compute: one a physical core, as many as this process may run on."""
    host = facts.host.value or HostFacts()
    known = [n for n in (host.cpu_physical, host.cpu_usable, host.cpu_logical) if n]
    if host.cgroup_cpus:
        known.append(max(1, int(host.cgroup_cpus)))
    if not known:
        return 1, ("The number of cores is unknown: one thread computes.",)
    return min(known), ()


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
