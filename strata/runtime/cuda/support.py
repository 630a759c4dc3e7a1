"""What of a model and a plan the CUDA kernels can run; the rest is refused by name, before anything is allocated."""

from __future__ import annotations

from strata.errors import UnsupportedModel
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.cuda_layout import LAYOUTS, row_bytes, staged_bytes
from strata.runtime.models.common import EMBEDDING, ROPE_FACTORS

_HEADS = (16, 32, 64, 128, 256)
_FLOATS = ("F32", "F16", "BF16")
_MOST_TOP_K = 32
_BESIDE_STAGED = 4 << 10  # shared memory that a kernel of one token has besides its staged rows, at most


def why_not(file: GGUFFile, facts: ModelFacts, kv: str, shared: int | None = None) -> str | None:
    """Return the first thing of a model that the kernels cannot run, or None.

    Parameters
    ----------
    file : GGUFFile
    facts : ModelFacts
        Of `file`.
    kv : str
        Type of the KV cache.
    shared : int, optional
        Bytes of shared memory that a block can ask for on the device; None leaves that out.
    """
    if kv not in ("f16", "f32"):
        return f"a KV cache of type {kv} has no kernel"
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
    return None if shared is None else _too_long(file, facts, shared)


def _too_long(file: GGUFFile, facts: ModelFacts, shared: int) -> str | None:
    """Return what a block cannot hold the activations of: a matrix's row, or all chosen experts' rows of down."""
    matrices = {n: t.shape[0] for n, t in file.tensors.items() if len(t.shape) == 2 and n != EMBEDDING}
    longest = max(matrices, key=lambda name: matrices[name])
    experts = facts.top_k * facts.expert_width
    columns = max(matrices[longest], experts)
    needed = staged_bytes(columns, 1) + _BESIDE_STAGED
    if needed <= shared:
        return None
    what = f"{facts.top_k} experts of {facts.expert_width:,} values" if columns == experts else f"tensor {longest}"
    return f"the activations of {what} take {needed:,} bytes of shared memory; a block of this GPU has {shared:,}"


def check_cuda(file: GGUFFile, facts: ModelFacts, kv: str, shared: int | None = None) -> None:
    """Refuse what `why_not` names.

    Raises
    ------
    UnsupportedModel
    """
    found = why_not(file, facts, kv, shared)
    if found:
        remedy = "Use --kv f16" if found.startswith("a KV cache") else "Use --device cpu"
        raise UnsupportedModel(f"run model {file.path.name} on the GPU", found, remedy)
