"""Whether a model can be run, decided from its header: what has no implementation is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from strata.errors import UnsupportedModel
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.dequant import can_dequantise
from strata.kernels.ops import Rope
from strata.runtime.models.common import Decoder, ModelConfig, Scales

# Keys that most architectures have no use for, with the values that mean "not used"; `Decoder.keys` are the exceptions.
_UNUSED: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_gating_func": (0, 1),  # not said, softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1,),
    "nextn_predict_layers": (0,),
    "residual_scale": (1,),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
# Every other key of "rope." is refused, since it would turn q and k in a way that nobody here knows of.
_ROPE_KEYS = {
    *("dimension_count", "freq_base", "scaling.type", "scaling.factor", "scale_linear"),
    *("scaling.original_context_length", "scaling.finetuned"),  # how it was trained, which only YaRN's formula reads
    *("scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),  # bounds of YaRN's ramp, which no other type has
    *(key.removeprefix("rope.") for key in _UNUSED if key.startswith("rope.")),
}
_WORDS = {"expert_gating_func": {2: "sigmoid", 3: "softmax over the chosen", 4: "square root of softplus"}}


def check_architecture(file: GGUFFile, supported: Sequence[str]) -> None:
    """Refuse a file of an architecture that is not `supported`."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in supported:
        _refuse(file, f"architecture {architecture!r} is not implemented; those that are: {', '.join(supported)}")


def read_config(file: GGUFFile, facts: ModelFacts, model: type[Decoder]) -> ModelConfig:
    """Read the numbers of a model, refusing every key that asks for what is not implemented.

    Raises
    ------
    UnsupportedModel
        Naming the first such key.
    """
    prefix = f"{facts.architecture}."
    for key, unused in {**_UNUSED, **model.unused}.items():
        if key in model.keys:
            continue
        value = file.metadata.get(prefix + key)
        if isinstance(value, np.ndarray | list) or (value is not None and value not in unused):
            word = _WORDS.get(key, {}).get(value) if isinstance(value, int) else None
            _refuse(file, f"{prefix}{key} is {value}{f' ({word})' if word else ''}, which is not implemented")
    if len(set(facts.kv_heads)) != 1 or not facts.kv_heads[0] or facts.heads % facts.kv_heads[0]:
        _refuse(file, f"{facts.heads} heads over {sorted(set(facts.kv_heads))} KV heads are not implemented")
    eps = _real(file, prefix + "attention.layer_norm_rms_epsilon")
    normalise = bool(file.metadata.get(prefix + "expert_weights_norm", model.normalise))
    return ModelConfig(facts, eps, _read_rope(file, facts, model), normalise, _read_scales(file, facts, model))


def check_tensors(file: GGUFFile, config: ModelConfig, model: type[Decoder]) -> None:
    """Refuse tensors that the architecture would not use, that are missing, misshapen or of an unreadable type.

    Raises
    ------
    UnsupportedModel
        Naming the first such tensor and how many more there are.
    """
    required = model.tensors(config.facts)
    shapes = required | model.optional_tensors(config)
    for problem, names in (
        ("is there, which {architecture} has no use for here", [name for name in file.tensors if name not in shapes]),
        ("is missing", [name for name in required if name not in file.tensors]),
    ):
        if names:
            _refuse(file, f"tensor {names[0]} {problem.format(architecture=config.facts.architecture)}{_more(names)}")
    wrong = [name for name, tensor in file.tensors.items() if tensor.shape != shapes[name]]
    if wrong:
        found, expected = file.tensors[wrong[0]].shape, shapes[wrong[0]]
        _refuse(file, f"tensor {wrong[0]} has shape {list(found)}, not {list(expected)}{_more(wrong)}")
    strange = [name for name, tensor in file.tensors.items() if not can_dequantise(tensor.type.name)]
    if strange:
        _refuse(
            file,
            f"tensor {strange[0]} is {file.tensors[strange[0]].type.name}, which is not implemented{_more(strange)}",
        )


def _read_scales(file: GGUFFile, facts: ModelFacts, model: type[Decoder]) -> Scales:
    """Read the factors that `model` has keys for; one of 0 stands for none, and logits are divided by theirs."""
    prefix = f"{facts.architecture}."

    def factor(key: str, default: float) -> float:
        used = key in model.keys and file.metadata.get(prefix + key) != 0
        return _real(file, prefix + key, default) if used else default

    return Scales(
        attention=factor("attention.scale", facts.key_length**-0.5),
        embedding=factor("embedding_scale", 1.0),
        residual=factor("residual_scale", 1.0),
        logits=1 / _real(file, prefix + "logit_scale") if "logit_scale" in model.keys else 1.0,
    )


def _read_rope(file: GGUFFile, facts: ModelFacts, model: type[Decoder]) -> Rope:
    prefix = f"{facts.architecture}.rope."
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_KEYS:
            _refuse(file, f"metadata key {key} is not known, and it would change the rotary embedding")
    dims = int(_real(file, prefix + "dimension_count", facts.key_length))
    if not 0 < dims <= facts.key_length or dims % 2:
        _refuse(file, f"{prefix}dimension_count is {dims} for heads of {facts.key_length}")
    base = _real(file, prefix + "freq_base", 10000.0)
    frequencies = base ** (-np.arange(0, dims, 2) / dims) / _rope_factor(file, prefix)
    return Rope(model.rope_style, dims, frequencies.astype(np.float32))


def _rope_factor(file: GGUFFile, prefix: str) -> float:
    """Read what positions are divided by.

    As llama.cpp reads it: a file that names no type means linear, ``rope.scale_linear`` is the older name of the
    factor, and a factor of 0 stands for none.
    """
    scaling = file.metadata.get(prefix + "scaling.type", "linear")
    if scaling not in ("none", "linear"):
        _refuse(file, f"{prefix}scaling.type is {scaling!r}; those implemented are none and linear")
    key = prefix + ("scaling.factor" if prefix + "scaling.factor" in file.metadata else "scale_linear")
    if scaling == "none" or file.metadata.get(key) == 0:
        return 1.0
    return _real(file, key, 1.0)


def _real(file: GGUFFile, key: str, default: float | None = None) -> float:
    """Read a positive number."""
    value = file.metadata.get(key, default)
    if not isinstance(value, int | float) or not value > 0:
        _refuse(file, f"metadata key {key} is " + ("missing" if value is None else f"{value!r}, not a positive number"))
    return float(value)


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""


def _refuse(file: GGUFFile, found: str) -> NoReturn:
    raise UnsupportedModel(
        f"run model {file.path.name}", found, "`strata plan` still works on it; to run, take another"
    )
