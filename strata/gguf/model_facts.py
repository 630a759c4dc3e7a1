"""What a GGUF header says of a model, as frozen data: all that a planner needs, for any architecture.

Sizes come from the tensor index alone, so a header without its weights is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from strata.gguf.keys import ArchitectureKeys
from strata.gguf.wording import shown

if TYPE_CHECKING:  # the reader loads numpy, which those who only hold facts need not wait for
    from strata.gguf.reader import GGUFFile, TensorInfo


# Architectures whose every n-th layer, from the first on, sees a window only: no key of theirs says so.
_WINDOW_PERIODS = {"gpt-oss": 2}


class TensorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A category of tensors: how many, how many weights, and their bytes as stored."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class ExpertClass(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of one size (layers quantised alike); one slot can hold any expert of its class."""

    layers: tuple[int, ...]
    experts_per_layer: int
    elements: int  # weights of one expert: gate + up + down
    bytes: int  # of one expert as stored
    types: tuple[str, str, str]  # quant types of gate, up, down


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One model by its numbers.

    Names follow the GGUF keys: `embedding` is hidden size E, `heads` H, `kv_heads` KV per layer (0 where a
    layer keeps no KV cache), `key_length` and `value_length` per head, `experts` N, `top_k` K,
    `expert_width` F, `shared_width` that of the expert that every token takes (0 where there is none),
    `feed_forward` the dense width.
    """

    name: str
    architecture: str
    path: str
    file_bytes: int  # all shards
    header_bytes: int
    header_sha256: str
    layers: int
    embedding: int
    heads: int
    kv_heads: tuple[int, ...]  # one per layer
    key_length: int
    value_length: int
    vocab: int
    context_length: int
    feed_forward: int
    experts: int
    top_k: int
    expert_width: int
    tied_head: bool  # no output.weight: the embedding is the head too
    embedding_table: TensorGroup
    head: TensorGroup  # output.weight; the embedding's numbers again when tied
    dense: TensorGroup  # everything else that is not a routed expert: attention, norms, routers, shared experts
    expert_classes: tuple[ExpertClass, ...]
    quant_types: tuple[str, ...]  # every type that occurs
    recurrent_state_bytes: int = 0  # of one sequence, float32: linear attention's states and convolution windows
    index_values: int = 0  # that a sparse attention caches for a token beside keys and values, over all layers
    window: int = 0  # tokens that the attention of `windowed_layers` sees, its own among them
    windowed_layers: tuple[int, ...] = ()
    shared_width: int = 0
    row_tables: TensorGroup = TensorGroup()  # read by the row, as the embedding is, but inside the layers
    draft: TensorGroup = TensorGroup()  # layers that only guess the next tokens; `layers` does not count them


def read_model_facts(file: GGUFFile) -> ModelFacts:
    """Gather the facts of a model of any architecture by the general rules of GGUF keys and tensor names.

    ``token_embd.weight`` is the embedding, ``output.weight`` the head, ``_exps.`` in the name of a layer's tensor
    marks routed experts, all else is dense. A layer with ``ssm_`` tensors and no ``attn_k.weight`` keeps no KV cache.

    Raises
    ------
    ModelFileError
        When a key or tensor that planning needs is missing or makes no sense; it is named.
    """
    keys = ArchitectureKeys(file)
    blocks = keys.number("block_count", least=1)
    if blocks > len(file.tensors):  # also bounds the per-layer tuples
        keys.fail(f"{keys.full('block_count')} is {blocks} in a file of {len(file.tensors)} tensors")
    layers = blocks - keys.number("nextn_predict_layers", 0)
    if layers < 1:
        keys.fail(f"{keys.full('nextn_predict_layers')} leaves none of the {blocks} blocks to be layers")
    embedding = keys.number("embedding_length", least=1)
    heads = max(keys.per_layer("attention.head_count", blocks))
    if heads < 1:
        keys.fail(f"{keys.full('attention.head_count')} is 0")
    key_length = keys.number("attention.key_length", embedding // heads, least=1)
    experts = keys.number("expert_count", 0)
    top_k = keys.number("expert_used_count", least=1) if experts else 0
    if top_k > experts:
        keys.fail(f"{keys.full('expert_used_count')} is {top_k}, more than the {experts} experts")
    feed_forward = max(keys.per_layer("feed_forward_length", blocks, 0 if experts else None))

    by_name = file.tensors
    if "token_embd.weight" not in by_name:
        keys.fail("tensor 'token_embd.weight' is missing")
    embedding_table = _group([by_name["token_embd.weight"]])
    tied_head = "output.weight" not in by_name
    draft = [tensor for name, tensor in by_name.items() if (_layer(name) or 0) >= layers]
    row_tables = [tensor for name, tensor in by_name.items() if name.startswith("per_layer_token_embd.")]
    apart = {"token_embd.weight", "output.weight", *(tensor.name for tensor in draft + row_tables)}
    windowed = _windowed_layers(keys, layers)
    dense = [tensor for name, tensor in by_name.items() if name not in apart and not _is_expert(name)]
    return ModelFacts(
        name=keys.text("general.name", file.path.stem),
        architecture=keys.architecture,
        path=str(file.path),
        file_bytes=file.file_bytes,
        header_bytes=file.header_bytes,
        header_sha256=file.header_sha256,
        layers=layers,
        embedding=embedding,
        heads=heads,
        kv_heads=_kv_heads(keys, file, blocks, heads)[:layers],
        key_length=key_length,
        value_length=keys.number("attention.value_length", key_length),
        vocab=keys.number("vocab_size", file.metadata.array_length("tokenizer.ggml.tokens"), least=1),
        context_length=keys.number("context_length", least=1),
        feed_forward=feed_forward,
        experts=experts,
        top_k=top_k,
        expert_width=keys.number("expert_feed_forward_length", _width(file, "exps", feed_forward)) if experts else 0,
        tied_head=tied_head,
        embedding_table=embedding_table,
        head=embedding_table if tied_head else _group([by_name["output.weight"]]),
        dense=_group(dense),
        expert_classes=_expert_classes(keys, file, blocks, layers, experts),
        quant_types=tuple(sorted({tensor.type.name for tensor in by_name.values()})),
        recurrent_state_bytes=_recurrent_state_bytes(keys, file, layers),
        index_values=_index_values(keys, file, layers),
        window=keys.number("attention.sliding_window", 0) if windowed else 0,
        windowed_layers=windowed,
        shared_width=keys.number("expert_shared_feed_forward_length", _width(file, "shexp", 0)),
        row_tables=_group(row_tables),
        draft=_group(draft),
    )


def _group(tensors: Sequence[TensorInfo]) -> TensorGroup:
    return TensorGroup(
        tensors=len(tensors),
        elements=sum(tensor.elements for tensor in tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
    )


def _width(file: GGUFFile, kind: str, default: int) -> int:
    """Width of the first expert of a kind, for files that have no key for it."""
    down = (tensor for name, tensor in file.tensors.items() if name.endswith(f".ffn_down_{kind}.weight"))
    return next((tensor.shape[0] for tensor in down), default)


def _kv_heads(keys: ArchitectureKeys, file: GGUFFile, blocks: int, heads: int) -> tuple[int, ...]:
    """KV heads per layer: what the key says, but none where a recurrent layer has taken attention's place."""
    recurrent = {_layer(name) for name in file.tensors if ".ssm_" in name}
    return tuple(
        0 if layer in recurrent and f"blk.{layer}.attn_k.weight" not in file.tensors else kv_heads
        for layer, kv_heads in enumerate(keys.per_layer("attention.head_count_kv", blocks, heads))
    )


def _recurrent_state_bytes(keys: ArchitectureKeys, file: GGUFFile, layers: int) -> int:
    """Float32 state [key size, inner size] and convolution window [kernel - 1, channels] of every recurrent layer."""
    state = keys.number("ssm.state_size", 0) * keys.number("ssm.inner_size", 0)
    total = 0
    for layer in range(layers):
        convolution = file.tensors.get(f"blk.{layer}.ssm_conv1d.weight")
        if convolution is not None and len(convolution.shape) == 2:
            kernel, channels = convolution.shape
            total += 4 * (state + (kernel - 1) * channels)
    return total


def _index_values(keys: ArchitectureKeys, file: GGUFFile, layers: int) -> int:
    """Every layer with an indexer caches one key of it for a token."""
    indexed = sum(f"blk.{layer}.indexer.k_proj.weight" in file.tensors for layer in range(layers))
    return indexed * keys.number("attention.indexer.key_length", 0)


def _windowed_layers(keys: ArchitectureKeys, layers: int) -> tuple[int, ...]:
    period = _WINDOW_PERIODS.get(keys.architecture)
    if period is None or not keys.number("attention.sliding_window", 0):
        return ()
    return tuple(range(0, layers, period))


def _layer(name: str) -> int | None:
    """Layer of a tensor named ``blk.LAYER.*``."""
    prefix, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if prefix == "blk" and number.isdecimal() and len(number) < 6 else None


def _is_expert(name: str) -> bool:
    return "_exps." in name and _layer(name) is not None


def _expert_classes(
    keys: ArchitectureKeys, file: GGUFFile, blocks: int, layers: int, experts: int
) -> tuple[ExpertClass, ...]:
    """Group the layers whose experts are of one size and kind, in layer order."""
    by_layer: defaultdict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in file.tensors.items():
        layer = _layer(name)
        if layer is None or not _is_expert(name):
            continue
        if layer >= blocks:
            keys.fail(f"tensor {shown(name)} is of no layer: {keys.full('block_count')} is {blocks}")
        if layer >= layers:
            continue  # a draft layer's
        if not experts or tensor.shape[-1] != experts or tensor.nbytes % experts:
            keys.fail(
                f"{keys.full('expert_count')} is {experts}; {shown(name)} of shape {tensor.shape} holds another number"
            )
        by_layer[layer][name.split(".", 2)[2]] = tensor
    if experts and not by_layer:
        keys.fail(f"{keys.full('expert_count')} is {experts}, but no tensor holds routed experts")

    layers_of: defaultdict[tuple[int, int, tuple[str, str, str]], list[int]] = defaultdict(list)
    for layer, tensors in sorted(by_layer.items()):
        group = _group(list(tensors.values()))
        kind = group.elements // experts, group.bytes // experts, _expert_types(keys, layer, tensors)
        layers_of[kind].append(layer)
    return tuple(
        ExpertClass(layers=tuple(alike), experts_per_layer=experts, elements=elements, bytes=nbytes, types=types)
        for (elements, nbytes, types), alike in layers_of.items()
    )


def _expert_types(keys: ArchitectureKeys, layer: int, tensors: dict[str, TensorInfo]) -> tuple[str, str, str]:
    """Types of gate, up and down; where gate and up are fused in one tensor, both have its type."""
    types = []
    for part, fused in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
        tensor = tensors.get(f"ffn_{part}_exps.weight") or tensors.get(f"ffn_{fused}_exps.weight")
        if tensor is None:
            keys.fail(f"tensor 'blk.{layer}.ffn_{part}_exps.weight' is missing")
        types.append(tensor.type.name)
    gate, up, down = types
    return gate, up, down
