"""Makes small GGUF files for tests, sound ones and broken ones."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.gguf.metadata import ValueType
from strata.gguf.types import TensorType


@dataclass(frozen=True)
class Raw:
    """A metadata value given by its type number and its bytes, for values that `encode_value` would not make."""

    type: int
    data: bytes


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; what is None is what a sound file has.

    `shape` is in ggml order (in, out, expert). `data` defaults to zeros, `offset` (counted from the start of the data)
    to the next free aligned place.
    """

    name: str
    shape: tuple[int, ...]
    type: int = TensorType.F32
    data: bytes | None = None
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        kind = TensorType(self.type)
        return math.prod(self.shape) // kind.block_elements * kind.block_bytes


def encode_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def encode_strings(texts: Sequence[str | bytes]) -> Raw:
    """An array of strings."""
    head = struct.pack("<IQ", ValueType.STRING, len(texts))
    return Raw(ValueType.ARRAY, head + b"".join(map(encode_string, texts)))


def encode_numbers(numbers: np.ndarray) -> Raw:
    """An array of numbers of the array's dtype."""
    kinds = {"u": "UINT", "i": "INT", "f": "FLOAT", "b": "BOOL"}
    name = kinds[numbers.dtype.kind] + ("" if numbers.dtype == bool else str(8 * numbers.dtype.itemsize))
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return Raw(ValueType.ARRAY, struct.pack("<IQ", ValueType[name], numbers.size) + little.tobytes())


def encode_value(value: object) -> bytes:
    """Type number and bytes of a value; int is UINT32, float FLOAT32, as in most files."""
    if isinstance(value, list):
        texts = value and isinstance(value[0], str | bytes)
        value = encode_strings(value) if texts else np.array(value, np.int32)
    if isinstance(value, np.ndarray):
        value = encode_numbers(value)
    if isinstance(value, Raw):
        return struct.pack("<I", value.type) + value.data
    if isinstance(value, bool):
        return struct.pack("<I?", ValueType.BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", ValueType.UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", ValueType.FLOAT32, value)
    assert isinstance(value, str | bytes)
    return struct.pack("<I", ValueType.STRING) + encode_string(value)


def gguf_bytes(
    metadata: Mapping[str, object] | Sequence[tuple[str | bytes, object]],
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    weights: bool = True,
) -> bytes:
    """A whole file; ``weights=False`` ends it after the header.

    `metadata` may be a list of pairs, so that a key can be there twice.
    """
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    alignment = next((value for key, value in pairs if key == "general.alignment" and isinstance(value, int)), 32) or 1
    header = [
        magic,
        struct.pack("<I", version),
        struct.pack("<Q", len(tensors) if tensor_count is None else tensor_count),
        struct.pack("<Q", len(pairs) if key_count is None else key_count),
    ]
    header += [encode_string(key) + encode_value(value) for key, value in pairs]
    end = 0
    placed: list[tuple[int, bytes]] = []
    for tensor in tensors:
        offset = end if tensor.offset is None else tensor.offset
        header.append(encode_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
        header.append(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset))
        if weights:
            data = bytes(tensor.nbytes) if tensor.data is None else tensor.data
            placed.append((offset, data))
            end = _padded(offset + len(data), alignment)
        else:
            end = _padded(offset + tensor.nbytes, alignment)
    start = b"".join(header)
    if not weights:
        return start
    body = bytearray(end)
    for offset, data in placed:
        body[offset : offset + len(data)] = data
    return start + bytes(_padded(len(start), alignment) - len(start)) + bytes(body)


def write_gguf(path: Path, *args: object, **options: object) -> Path:
    """Write `gguf_bytes` of the same arguments."""
    path.write_bytes(gguf_bytes(*args, **options))  # type: ignore[arg-type]
    return path


def moe_model(
    *,
    architecture: str = "qwen3moe",
    layers: int = 2,
    embedding: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head_length: int = 32,
    experts: int = 4,
    top_k: int = 2,
    expert_width: int = 32,
    vocab: int = 40,
    context: int = 512,
    expert_type: TensorType = TensorType.Q4_0,
) -> tuple[dict[str, object], list[Tensor]]:
    """Metadata and tensors of a sound little MoE model in the manner of qwen3moe."""
    keys: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": f"made {architecture}",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": embedding,
        f"{architecture}.feed_forward_length": 2 * embedding,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.key_length": head_length,
        f"{architecture}.attention.value_length": head_length,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 1e6,
        f"{architecture}.expert_count": experts,
        f"{architecture}.expert_used_count": top_k,
        f"{architecture}.expert_feed_forward_length": expert_width,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(vocab)],
    }
    tensors = [
        Tensor("token_embd.weight", (embedding, vocab)),
        Tensor("output_norm.weight", (embedding,)),
        Tensor("output.weight", (embedding, vocab)),
    ]
    for layer in range(layers):
        shapes = {
            "attn_norm": (embedding,),
            "attn_q": (embedding, heads * head_length),
            "attn_k": (embedding, kv_heads * head_length),
            "attn_v": (embedding, kv_heads * head_length),
            "attn_q_norm": (head_length,),
            "attn_k_norm": (head_length,),
            "attn_output": (heads * head_length, embedding),
            "ffn_norm": (embedding,),
            "ffn_gate_inp": (embedding, experts),
            "ffn_gate_exps": (embedding, expert_width, experts),
            "ffn_up_exps": (embedding, expert_width, experts),
            "ffn_down_exps": (expert_width, embedding, experts),
        }
        tensors += [
            Tensor(f"blk.{layer}.{name}.weight", shape, expert_type if "_exps" in name else TensorType.F32)
            for name, shape in shapes.items()
        ]
    return keys, tensors


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
