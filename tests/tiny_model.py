"""Tiny random models, written as GGUF files by gguf-py: an implementation other than the one under test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize


@dataclass(frozen=True)
class TinyModel:
    """What to write. `experts` 0 makes a dense llama, whatever `architecture` says of experts."""

    architecture: str = "qwen3moe"
    layers: int = 3
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    vocab: int = 96
    experts: int = 16
    top_k: int = 2
    width: int = 32  # of an expert, or of the dense feed-forward
    expert_type: str = "F32"
    down_type: str | None = None  # of the experts' down; None: like `expert_type`
    dense_type: str = "F32"  # of every other matrix
    tied: bool = False
    seed: int = 0

    def write(self, path: Path) -> Path:
        """Write the model to `path` and return it."""
        writer = gguf.GGUFWriter(path, self.architecture)
        self._add_keys(writer)
        rng = np.random.default_rng(self.seed)
        for name, shape in self._shapes().items():
            if "norm" in name:
                values = 1 + 0.1 * rng.standard_normal(shape)
            else:
                values = rng.standard_normal(shape) / np.sqrt(shape[-1])
            kind = gguf.GGMLQuantizationType[self._type(name)]
            writer.add_tensor(name, quantize(values.astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name("tiny")
        writer.add_block_count(self.layers)
        writer.add_context_length(2048)
        writer.add_embedding_length(self.embedding)
        writer.add_feed_forward_length(self.width)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_vocab_size(self.vocab)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.top_k)
            writer.add_expert_feed_forward_length(self.width)

    def _type(self, name: str) -> str:
        if "norm" in name or "ffn_gate_inp" in name:
            return "F32"
        if "down_exps" in name:
            return self.down_type or self.expert_type
        return self.expert_type if "_exps" in name else self.dense_type

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """NumPy shapes (the reverse of ggml's) of every tensor."""
        e, f, n = self.embedding, self.width, self.experts
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, e), "output_norm.weight": (e,)}
        if not self.tied:
            shapes["output.weight"] = (self.vocab, e)
        for layer in range(self.layers):
            block = {
                "attn_norm": (e,),
                "attn_q": (q, e),
                "attn_k": (kv, e),
                "attn_v": (kv, e),
                "attn_output": (e, q),
                "ffn_norm": (e,),
            }
            if self.architecture == "qwen3moe":
                block |= {"attn_q_norm": (self.head_size,), "attn_k_norm": (self.head_size,)}
            if n:
                block |= {
                    "ffn_gate_inp": (n, e),
                    "ffn_gate_exps": (n, f, e),
                    "ffn_up_exps": (n, f, e),
                    "ffn_down_exps": (n, e, f),
                }
            else:
                block |= {"ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}
            shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        return shapes
