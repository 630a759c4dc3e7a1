"""Headers of released models, whole but for their weights: every tensor with its name, shape and type.

Made from public configurations and the tensor names that converters write, so that `strata plan` can be asked before
anything is downloaded. Types are those of the shapes in `tests.doctor.shapes`, which the reader must find again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from strata.gguf.model_facts import ModelFacts
from strata.gguf.types import TensorType
from tests.doctor.shapes import FLASH_NEXT, Q3_NEXT, Q36_35B
from tests.gguf_maker import Tensor, gguf_bytes

F32, Q8 = TensorType.F32, TensorType.Q8_0
Named = tuple[str, tuple[int, ...], TensorType]
_HYBRIDS = {Q3_NEXT.name: (16, 32), Q36_35B.name: (16, 32), FLASH_NEXT.name: (16, 48)}  # key and value heads of 128


def write_header(m: ModelFacts, folder: Path) -> Path:
    """Write the header of a model in `shapes`, and nothing after it."""
    path = folder / f"{m.name}.gguf"
    path.write_bytes(gguf_bytes(_keys(m), [Tensor(*named) for named in _tensors(m)], weights=False))
    return path


def _keys(m: ModelFacts) -> dict[str, object]:
    drafts = 1 if m.draft.tensors else 0
    keys: dict[str, object] = {
        "block_count": m.layers + drafts,
        "context_length": m.context_length,
        "embedding_length": m.embedding,
        "feed_forward_length": m.expert_width,
        "attention.head_count": m.heads,
        "attention.head_count_kv": max(m.kv_heads),
        "attention.key_length": m.key_length,
        "attention.value_length": m.value_length,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": m.experts,
        "expert_used_count": m.top_k,
        "expert_feed_forward_length": m.expert_width,
        "vocab_size": m.vocab,
    }
    if m.window:
        keys["attention.sliding_window"] = m.window
    if m.name in _HYBRIDS:
        _, values = _HYBRIDS[m.name]
        keys |= {"ssm.state_size": 128, "ssm.inner_size": values * 128, "ssm.conv_kernel": 4}
    if drafts:
        keys["nextn_predict_layers"] = drafts
    if m.index_values:
        keys["attention.indexer.key_length"] = 128
    named = {f"{m.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": m.architecture, "general.name": m.name, **named}


def _tensors(m: ModelFacts) -> Iterator[Named]:
    table, head = (next(t for t in TensorType if _is(t, g.elements, g.bytes)) for g in (m.embedding_table, m.head))
    yield "token_embd.weight", (m.embedding, m.vocab), table
    yield "output_norm.weight", (m.embedding,), F32
    yield "output.weight", (m.embedding, m.vocab), head
    if m.row_tables.bytes:
        yield "per_layer_token_embd.weight", (160, 320_001_536), TensorType.IQ4_NL
    types = {layer: c.types for c in m.expert_classes for layer in c.layers}
    for layer in range(m.layers):
        attends = m.kv_heads[layer] > 0
        parts = [*(_attention(m) if attends else _recurrent(m)), *_experts(m, types[layer])]
        for name, shape, kind in parts:
            yield f"blk.{layer}.{name}", shape, kind
    if m.draft.tensors:
        for name, shape, kind in (*_attention(m), *_experts(m, types[0])):
            yield f"blk.{m.layers}.{name}", shape, kind


def _attention(m: ModelFacts) -> Iterator[Named]:
    e, kv = m.embedding, max(m.kv_heads) * m.key_length
    gated = 2 if m.name in _HYBRIDS else 1  # a gate for every value of the output, beside the queries
    yield "attn_norm.weight", (e,), F32
    yield "attn_q.weight", (e, gated * m.heads * m.key_length), Q8
    yield "attn_k.weight", (e, kv), Q8
    yield "attn_v.weight", (e, kv), Q8
    yield "attn_output.weight", (m.heads * m.value_length, e), Q8
    if m.architecture == "gpt-oss":
        yield "attn_sinks.weight", (m.heads,), F32
    elif m.architecture != "llama":
        yield "attn_q_norm.weight", (m.key_length,), F32
        yield "attn_k_norm.weight", (m.key_length,), F32
    if m.index_values:
        yield "indexer.k_proj.weight", (e, 128), Q8


def _recurrent(m: ModelFacts) -> Iterator[Named]:
    e, (keys, values) = m.embedding, _HYBRIDS[m.name]
    channels = 128 * (2 * keys + values)
    yield "attn_norm.weight", (e,), F32
    yield "attn_qkv.weight", (e, channels), Q8
    yield "attn_gate.weight", (e, 128 * values), Q8
    yield "ssm_conv1d.weight", (4, channels), F32
    yield "ssm_ba.weight", (e, 2 * values), Q8
    yield "ssm_dt.bias", (values,), F32
    yield "ssm_a", (values,), F32
    yield "ssm_norm.weight", (128,), F32
    yield "ssm_out.weight", (128 * values, e), Q8


def _experts(m: ModelFacts, types: tuple[str, str, str]) -> Iterator[Named]:
    e, f, n = m.embedding, m.expert_width, m.experts
    gate, up, down = (TensorType[kind] for kind in types)
    if f % down.block_elements:  # rows of 640 fill no block of 256, so quantisers fall back to blocks of 32
        down = TensorType.IQ4_NL
    yield "ffn_norm.weight", (e,), F32
    yield "ffn_gate_inp.weight", (e, n), F32
    yield "ffn_gate_exps.weight", (e, f, n), gate
    yield "ffn_up_exps.weight", (e, f, n), up
    yield "ffn_down_exps.weight", (f, e, n), down
    if m.name in _HYBRIDS:
        for part in ("gate", "up", "down"):
            yield f"ffn_{part}_shexp.weight", (f, e) if part == "down" else (e, f), Q8


def _is(kind: TensorType, elements: int, nbytes: int) -> bool:
    return elements % kind.block_elements == 0 and elements // kind.block_elements * kind.block_bytes == nbytes
