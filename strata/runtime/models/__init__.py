"""The architectures that can be run: one file each, written once against `strata.kernels.ops.Ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile
from strata.kernels.ops import Array, KvLayer, Ops, Weight
from strata.runtime.models.common import Decoder, Experts, ModelConfig
from strata.runtime.models.granitemoe import GraniteMoe
from strata.runtime.models.llama import Llama
from strata.runtime.models.olmoe import Olmoe
from strata.runtime.models.qwen2moe import Qwen2Moe
from strata.runtime.models.qwen3moe import Qwen3Moe
from strata.runtime.models.support import check_architecture, check_tensors, read_config

__all__ = ["ARCHITECTURES", "Decoder", "Experts", "ModelConfig", "build_model", "load_config"]

ARCHITECTURES: Mapping[str, type[Decoder]] = {
    "granitemoe": GraniteMoe,
    "llama": Llama,
    "olmoe": Olmoe,
    "qwen2moe": Qwen2Moe,
    "qwen3moe": Qwen3Moe,
}


def load_config(file: GGUFFile) -> ModelConfig:
    """Read what running a model takes, and refuse it here, before anything is loaded, when it cannot be run.

    Only the header is read.

    Raises
    ------
    UnsupportedModel
        Naming the architecture, key or tensor that has no implementation.
    ModelFileError
        When a key that every model needs is missing or makes no sense.
    """
    check_architecture(file, sorted(ARCHITECTURES))
    facts = read_model_facts(file)
    model = ARCHITECTURES[facts.architecture]
    config = read_config(file, facts, model)
    check_tensors(file, config, model)
    return config


def build_model(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    ops: Ops,
    buffers: Mapping[str, Array],
    kv: Sequence[KvLayer],
    experts: Experts | None,
) -> Decoder:
    """Put a model together; see `Decoder` for the parts."""
    return ARCHITECTURES[config.facts.architecture](config, weights, ops, buffers, kv, experts)
