"""Puts a model together on the device by its plan: all memory first, then the file, then the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from strata.doctor.plan import AllocationPlan, Tier
from strata.gguf import cuda_footprint, footprint
from strata.gguf.cuda_prompt_footprint import prompt_rows_at
from strata.gguf.footprint import BufferSpec
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_layout import lay_out
from strata.kernels.cuda_ops import CudaOps, CudaWeight
from strata.kernels.cuda_prompt import PromptOps
from strata.kernels.dequant import dequantise
from strata.kernels.ops import Array, Weight
from strata.runtime.cuda.cached import CachedExperts, first_in
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.cuda.embedding import LINE as EMBEDDING_LINE
from strata.runtime.cuda.embedding import HostRows, PinnedTable
from strata.runtime.cuda.experts import ResidentExperts, largest_call, pools_of
from strata.runtime.cuda.graph import Recorder
from strata.runtime.cuda.prompt import PromptExperts, Prompts
from strata.runtime.cuda.step import CudaStep
from strata.runtime.cuda.support import check_cuda
from strata.runtime.cuda.touch import moved_out
from strata.runtime.cuda.upload import Matrix, Uploader
from strata.runtime.cuda.weights import CudaWeights
from strata.runtime.expert_store import PAGEABLE_LINE, PINNED_LINE, STAGING_LINE, Bytes, ExpertStore
from strata.runtime.kv_cache import KvCache
from strata.runtime.loader import LoadedModel, LoadOptions, expert_tensors
from strata.runtime.memory import PlannedMemory
from strata.runtime.models import ModelConfig, build_model
from strata.runtime.models.common import EMBEDDING, HEAD, ROPE_FACTORS
from strata.runtime.profile import hottest_first, read_profile

_READERS = 8  # threads that read experts into RAM: as many as bring the others to the device
_LINES = ("dense", "head", "kv_cache", "workspace", "logits", "host_io", EMBEDDING_LINE)


def load_cuda(
    file: GGUFFile,
    config: ModelConfig,
    plan: AllocationPlan,
    memory: PlannedMemory,
    device: CudaDevice,
    load: LoadOptions,
) -> LoadedModel:
    """Load a model into `memory`, which holds whatever was taken when this fails.

    Raises
    ------
    UnsupportedModel
        The kernels cannot run it.
    AllocationFailed, DeviceFailed
    """
    facts = config.facts
    check_cuda(file, facts, device.shared_bytes)
    pools = tuple(c.line for c in plan.experts.classes)
    memory.take((*_LINES, *pools, STAGING_LINE, PAGEABLE_LINE, PINNED_LINE))
    weights = CudaWeights(file, memory)
    cells = [specs for specs in footprint.kv_cache(facts, plan.context, plan.kv) if specs]
    kv = KvCache(memory, cells, capacity=plan.context)
    buffers = _carve(memory, "workspace", cuda_footprint.workspace(facts, plan.chunk))
    buffers["logits"] = memory.buffer("logits", footprint.logits(facts))
    host = _carve(memory, "host_io", cuda_footprint.host_io(facts, plan.chunk))
    embedding = None if facts.tied_head else _embedding(file, plan, memory)
    with ExitStack() as undo, device.errors("load the model"), device.stream:
        ops = CudaOps({name.removeprefix("ops."): array for name, array in buffers.items()})
        undo.callback(ops.close)
        undo.callback(device.drain)
        recorder = Recorder(device.stream)
        uploader = Uploader(device, ops, host["pieces"], buffers["piece"])
        store, experts = _experts(file, facts, plan, memory, (device, ops, recorder, buffers, host), load)

        def matrices() -> Iterator[Matrix]:
            yield from weights.matrices()
            if experts:
                yield from experts.matrices(file, expert_tensors(facts))

        to_read = weights.stored_bytes + (embedding.stored_bytes if embedding else 0)
        to_read += store.held_bytes if store else 0
        to_read += experts.first_bytes if experts else 0
        step = load.counted(to_read)
        uploader.load(matrices(), step)
        if embedding:
            embedding.load(step)
        if store:
            store.load(step, _READERS)
        place = buffers["inputs"][cuda_footprint.INPUT_ROWS :]
        table = _table(file, weights.by_name[HEAD], place, embedding, device)
        rope = _rope(file, config, buffers["rope"], device)
        by_name = weights.by_name | {EMBEDDING: table}
        decoder = build_model(rope, by_name, ops, buffers, kv.layers, experts)
        rows = embedding if isinstance(embedding, HostRows) else None
        prompts = None
        resident = experts if isinstance(experts, ResidentExperts) else None
        if cuda_footprint.takes_prompts(facts, plan.chunk) and (resident or not facts.experts):
            place = buffers["prompt.inputs"][prompt_rows_at(plan.chunk) :]
            by_name[EMBEDDING] = _table(file, by_name[HEAD], place, embedding, device)
            prompts = _prompts(rope, by_name, kv, device, ops, buffers, host, rows, resident)
        run = CudaStep(device, ops, recorder, decoder, buffers, host, rows, experts, prompts)
        run.prepare(load.compiling)
        notes = (*_unpinned(device), *moved_out(device, memory, buffers["piece"], host["pieces"]))
        undo.pop_all()
        if experts:
            experts.forget()
        most = prompts.most if prompts else largest_call(plan, facts, len(buffers["x"]))
        return LoadedModel(run, kv, experts, most, notes)


def _unpinned(device: CudaDevice) -> tuple[str, ...]:
    if not device.unpinned_bytes:
        return ()
    return (
        f"{device.unpinned_bytes / (1 << 20):,.0f} MiB of experts stay in ordinary RAM: the system refused to page-lock"
        " more. They are brought by the CPU, so answers are slower than planned (--pinned-budget plans for less).",
    )


def _carve(memory: PlannedMemory, line: str, specs: tuple[BufferSpec, ...]) -> dict[str, Any]:
    return {spec.name: memory.buffer(line, spec) for spec in specs}


def _embedding(file: GGUFFile, plan: AllocationPlan, memory: PlannedMemory) -> PinnedTable | HostRows:
    table = file.tensors[EMBEDDING]
    raw = file.raw(EMBEDDING).reshape(table.shape[1], -1)
    line = plan.line(EMBEDDING_LINE)
    tier = Tier.FILE if line is None else line.tier
    if tier is Tier.PINNED:
        return PinnedTable(raw, table.type.name, memory)
    return HostRows(raw, table.type.name, memory, held=tier is not Tier.FILE)


def _table(
    file: GGUFFile, head: CudaWeight, place: Array, embedding: PinnedTable | HostRows | None, device: CudaDevice
) -> CudaWeight:
    """The matrix that tokens are looked up in: a tied head, the host's table, or the few rows that come with them."""
    if embedding is None:
        return head
    table = file.tensors[EMBEDDING]
    if isinstance(embedding, PinnedTable):
        return CudaWeight(device.mapped(embedding.table), table.type.name, table.shape[1], table.shape[0])
    return CudaWeight(place, table.type.name, len(place) * table.shape[1] // table.nbytes, table.shape[0])


def _prompts(
    config: ModelConfig,
    by_name: Mapping[str, Weight],
    kv: KvCache,
    device: CudaDevice,
    ops: CudaOps,
    buffers: Mapping[str, Array],
    host: Mapping[str, Any],
    rows: HostRows | None,
    resident: ResidentExperts | None,
) -> Prompts:
    """Put the model together a second time, over the same weights and cells, for chunks of a prompt."""
    mine, hosts = (
        {name.removeprefix("prompt."): array for name, array in each.items() if name.startswith("prompt.")}
        for each in (buffers, host)
    )
    prompt_ops = PromptOps(ops, mine, config.facts.expert_width)
    experts = PromptExperts(prompt_ops, resident.slots, mine["counts"]) if resident else None
    decoder = build_model(config, by_name, prompt_ops, mine, kv.layers, experts)
    return Prompts(device, decoder, mine, hosts, rows, resident)


def _rope(file: GGUFFile, config: ModelConfig, place: Array, device: CudaDevice) -> ModelConfig:
    """Bring the rotary frequencies, divided by the file's factors where it has some, to the device."""
    frequencies = np.ascontiguousarray(config.rope.inverse_frequencies, np.float32)
    if ROPE_FACTORS in file.tensors:
        factors = np.empty_like(frequencies)
        dequantise(file.raw(ROPE_FACTORS), file.tensors[ROPE_FACTORS].type.name, factors)
        frequencies = frequencies / factors
    place = place[: len(frequencies)]
    device.to_device(place, frequencies)
    device.wait()
    return replace(config, rope=replace(config.rope, inverse_frequencies=place))


def _experts(
    file: GGUFFile,
    facts: ModelFacts,
    plan: AllocationPlan,
    memory: PlannedMemory,
    parts: tuple[CudaDevice, CudaOps, Recorder, dict[str, Any], dict[str, Any]],
    load: LoadOptions,
) -> tuple[ExpertStore | None, ResidentExperts | CachedExperts | None]:
    if not facts.experts:
        return None, None
    device, ops, recorder, buffers, host = parts
    pools = pools_of(memory, plan, facts)
    if plan.experts.slots == plan.experts.total:
        return None, ResidentExperts(ops, pools, facts)
    types = {layer: pool.types for pool in pools for layer in pool.planned.layers}

    def arrange(layer: int, part: int, raw: Bytes, out: Bytes) -> None:
        lay_out(types[layer][part], raw, out)

    uses = read_profile(load.profile, (facts.layers, facts.experts)) if load.profile else None
    hottest = None
    if uses is not None:  # what starts in VRAM is asked of the host last
        first = [key for pool in pools for key in first_in(pool, uses, facts.experts)]
        keys = [layer * facts.experts + expert for layer in types for expert in range(facts.experts)]
        hottest = hottest_first(uses, sorted(set(keys) - set(first))) + first
    tensors = expert_tensors(facts)
    store = ExpertStore(file, tensors, facts.experts, plan.experts, memory, hottest=hottest, arrange=arrange)
    policy, threads = load.device_policy, plan.threads
    return store, CachedExperts(device, ops, recorder, pools, store, facts, buffers, host, policy, threads, uses)
