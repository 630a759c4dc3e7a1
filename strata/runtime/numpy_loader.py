"""The numpy backend: loads a model by its plan into RAM, and runs its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan
from strata.gguf import footprint
from strata.gguf.reader import GGUFFile
from strata.kernels.numpy_ops import NumpyOps
from strata.kernels.ops import Array
from strata.runtime.expert_cache import ExpertCache
from strata.runtime.expert_store import PAGEABLE_LINE, PINNED_LINE, STAGING_LINE, ExpertStore
from strata.runtime.kv_cache import KvCache
from strata.runtime.loader import LoadedModel, LoadOptions, expert_tensors
from strata.runtime.memory import TEMPORARIES_LINE, PlannedMemory, charged_to, take_host
from strata.runtime.models import Decoder, ModelConfig, build_model
from strata.runtime.sampler import SamplerOptions
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


class NumpyBackend:
    """Implements `strata.runtime.loader.Backend` on the CPU: every tier is ordinary RAM."""

    take = staticmethod(take_host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def vram(self) -> tuple[int | None, int | None]:
        """See `Backend.vram`: there is none."""
        return None, None

    def load(
        self, file: GGUFFile, config: ModelConfig, plan: AllocationPlan, memory: PlannedMemory, load: LoadOptions
    ) -> LoadedModel:
        """See `Backend.load`."""
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
            store = ExpertStore(file, expert_tensors(facts), facts.experts, plan.experts, memory)
            slots = HostSlots(memory, facts, plan.experts.slots)
            policy = load.policy(facts.layers, facts.experts)
            experts = ExpertCache(store, slots, policy, layers=facts.layers, ops=ops, results=buffers["results"])
        step = load.counted(weights.stored_bytes + (store.held_bytes if store else 0))
        with charged_to(plan, TEMPORARIES_LINE):
            weights.load(step)
            if store:
                store.load(step)
        decoder = build_model(config, weights.by_name, ops, buffers, kv.layers, experts)
        return LoadedModel(NumpyStep(decoder, logits, plan), kv, experts, plan.chunk)


class NumpyStep:
    """Implements `strata.runtime.loader.Step`; `logits` is float32 [1, V]."""

    def __init__(self, decoder: Decoder, logits: NDArray[np.float32], plan: AllocationPlan) -> None:
        self._decoder = decoder
        self._logits = logits
        self._plan = plan

    def __call__(self, tokens: Sequence[int], position: int, *, logits: bool) -> NDArray[np.float32] | None:
        """See `Step`."""
        with charged_to(self._plan, TEMPORARIES_LINE):
            x = self._decoder.forward(np.array(tokens, np.int32), position)
            if not logits:
                return None
            self._decoder.logits(x[-1:], self._logits)
        last: NDArray[np.float32] = self._logits[0]
        return last

    def chain(self, options: SamplerOptions) -> None:
        """See `Step`: the host is where it computes."""

    def close(self) -> None:
        """See `Step`: there is nothing."""
