"""Puts a model together by its plan: take all memory, then read, then build.

Nothing is read before every line of the plan has been granted, so a refusal comes at once and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan
from strata.gguf import footprint
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.numpy_ops import NumpyOps
from strata.kernels.ops import Array
from strata.runtime.expert_cache import ExpertCache
from strata.runtime.expert_store import PAGEABLE_LINE, PINNED_LINE, STAGING_LINE, ExpertStore
from strata.runtime.kv_cache import KvCache
from strata.runtime.memory import TEMPORARIES_LINE, PlannedMemory, charged_to
from strata.runtime.models import Decoder, ModelConfig, build_model
from strata.runtime.policies import EvictionPolicy
from strata.runtime.slots import HostSlots
from strata.runtime.weights import Weights

# What is carved into arrays. The other lines are charged for what nobody hands out: the interpreter and its
# libraries ("context"), NumPy's temporaries, and the model file.
_LINES = (
    "dense",
    "head",
    "kv_cache",
    "workspace",
    "logits",
    "expert_slots",
    "embedding",
    STAGING_LINE,
    PAGEABLE_LINE,
    PINNED_LINE,
)

LoadProgress = Callable[[int, int], None]  # bytes read, bytes to read
MakePolicy = Callable[[int], EvictionPolicy]  # from the number of experts in the model


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run. `experts` is None for a dense one; `logits` is float32 [1, V]."""

    decoder: Decoder
    kv: KvCache
    experts: ExpertCache | None
    logits: NDArray[np.float32]


def load_model(
    file: GGUFFile,
    config: ModelConfig,
    plan: AllocationPlan,
    memory: PlannedMemory,
    *,
    policy: MakePolicy,
    progress: LoadProgress,
) -> LoadedModel:
    """Load a model into `memory`, which holds whatever was taken when this fails.

    Raises
    ------
    AllocationFailed
        A memory refused a line.
    """
    facts = config.facts
    memory.take(_LINES)
    weights = Weights(file, plan, memory)
    cells = [specs for specs in footprint.kv_cache(facts, plan.context, plan.kv) if specs]
    kv = KvCache(memory, cells, capacity=plan.context)
    buffers: Mapping[str, Array] = {
        spec.name: memory.buffer("workspace", spec)
        for spec in footprint.workspace(facts, plan.chunk, plan.kv, plan.threads)
    }
    logits = memory.buffer("logits", footprint.logits(facts))
    ops = NumpyOps(buffers)
    store = experts = None
    if facts.experts:
        store = ExpertStore(file, _expert_tensors(facts), facts.experts, plan.experts, memory)
        slots = HostSlots(memory, facts, plan.experts.slots)
        keys = facts.layers * facts.experts
        experts = ExpertCache(store, slots, policy(keys), layers=facts.layers, ops=ops, results=buffers["results"])

    to_read = weights.stored_bytes + (store.held_bytes if store else 0)
    read = 0

    def step(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        progress(read, to_read)

    progress(0, to_read)
    with charged_to(plan, TEMPORARIES_LINE):
        weights.load(step)
        if store:
            store.load(step)
    decoder = build_model(config, weights.by_name, ops, buffers, kv.layers, experts)
    return LoadedModel(decoder, kv, experts, logits)


def _expert_tensors(facts: ModelFacts) -> dict[int, tuple[str, str, str]]:
    """Names of the gate, up and down tensors of each layer that has experts."""
    layers = sorted(layer for size_class in facts.expert_classes for layer in size_class.layers)
    return {
        layer: (
            f"blk.{layer}.ffn_gate_exps.weight",
            f"blk.{layer}.ffn_up_exps.weight",
            f"blk.{layer}.ffn_down_exps.weight",
        )
        for layer in layers
    }
