"""What of a model the CUDA kernels can run; the rest is refused by name, before anything is allocated."""

from __future__ import annotations

from strata.errors import UnsupportedModel
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_layout import LAYOUTS, row_bytes
from strata.runtime.models.common import ROPE_FACTORS

_HEADS = (16, 32, 64, 128, 256)
_FLOATS = ("F32", "F16", "BF16")
_MOST_TOP_K = 32


def why_not(file: GGUFFile, facts: ModelFacts) -> str | None:
    """Return the first thing of a model that the kernels cannot run, or None."""
    if facts.key_length != facts.value_length or facts.key_length not in _HEADS:
        return f"heads of {facts.key_length} and {facts.value_length} values have no kernel"
    if facts.top_k > _MOST_TOP_K:
        return f"{facts.top_k} experts a token have no kernel"
    for name, tensor in file.tensors.items():
        type_, vector = tensor.type.name, len(tensor.shape) == 1
        allowed = ("F32",) if vector else _FLOATS if "ffn_gate_inp" in name else tuple(LAYOUTS)
        if type_ not in allowed and name != ROPE_FACTORS:
            return f"tensor {name} is {type_}; the kernels read {', '.join(allowed)} there"
    for experts in facts.expert_classes:
        gate, up, _ = experts.types
        if gate != up:
            return f"the experts' gate is {gate} and their up {up}; the kernels read one type for both"
        nbytes = facts.expert_width * row_bytes(gate, facts.embedding)
        if nbytes % 16:
            return f"the experts' matrices of {nbytes} bytes do not start on multiples of 16"
    return None


def check_cuda(file: GGUFFile, facts: ModelFacts) -> None:
    """Refuse what `why_not` names.

    Raises
    ------
    UnsupportedModel
    """
    found = why_not(file, facts)
    if found:
        raise UnsupportedModel(f"run model {file.path.name} on the GPU", found, "Use --device cpu")
