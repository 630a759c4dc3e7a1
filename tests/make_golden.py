"""Makes the golden models of architectures with a shared expert, and their answers, with Hugging Face transformers.

Not a test, and nothing that the tests need: with `torch`, `transformers` and `gguf` installed, ``python -m
tests.make_golden`` makes the files anew. All weights are random, so that a missing or swapped tensor shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"
LAYERS, EMBEDDING, HEADS, GROUPS, HEAD = 2, 64, 4, 2, 16
EXPERTS, TOP_K, WIDTH, SHARED, VOCAB, TOKENS = 6, 2, 32, 48, 512, 72
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": EMBEDDING,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
BASE = 50000.0


def qwen2moe() -> tuple[PreTrainedModel, dict[str, float]]:
    """Return the model and the keys that are its architecture's own."""
    config = Qwen2MoeConfig(
        num_experts=EXPERTS,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=SHARED,
        intermediate_size=SHARED,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        **COMMON,
    )
    assert not config.norm_topk_prob
    return Qwen2MoeForCausalLM(config), {}


def granitemoe_shared() -> tuple[PreTrainedModel, dict[str, float]]:
    """Return the model and the keys that are its architecture's own."""
    scales = {"embedding": 6.0, "attention": 0.125, "residual": 0.3, "logit": 4.0}
    config = GraniteMoeSharedConfig(
        num_local_experts=EXPERTS,
        intermediate_size=WIDTH,
        shared_intermediate_size=SHARED,
        embedding_multiplier=scales["embedding"],
        attention_multiplier=scales["attention"],
        residual_multiplier=scales["residual"],
        logits_scaling=scales["logit"],
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        **COMMON,
    )
    keys = {f"{name}_scale": value for name, value in scales.items() if name != "attention"}
    return GraniteMoeSharedForCausalLM(config), keys | {"attention.scale": scales["attention"]}


def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Give every tensor values of a size that keeps activations about 1, and routers and gates spread out."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            values = 1 + 0.2 * values if "norm" in name else 0.3 * values
        else:
            values *= (3 if "gate.weight" in name or "router" in name else 1) / parameter.shape[-1] ** 0.5
        parameter.data = values


def tensors_of(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the tensors by their names in a GGUF file, in NumPy's order of dimensions."""
    state = {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}
    found = {"token_embd.weight": state["embed_tokens.weight"], "output_norm.weight": state["norm.weight"]}
    if architecture == "qwen2moe":
        found["output.weight"] = state["lm_head.weight"]
    for layer in range(LAYERS):
        own = {name.split(".", 2)[2]: value for name, value in state.items() if name.startswith(f"layers.{layer}.")}
        block = {f"attn_{part}": own[f"self_attn.{part}_proj.weight"] for part in "qkv"}
        block |= {"attn_output": own["self_attn.o_proj.weight"], "attn_norm": own["input_layernorm.weight"]}
        block |= {"ffn_norm": own["post_attention_layernorm.weight"]}
        if architecture == "qwen2moe":
            found |= {f"blk.{layer}.attn_{part}.bias": own[f"self_attn.{part}_proj.bias"] for part in "qkv"}
            experts, router = "mlp.experts", "mlp.gate.weight"
            shared = {part: own[f"mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")}
            block["ffn_gate_inp_shexp"] = own["mlp.shared_expert_gate.weight"].reshape(-1)
        else:
            # The rotary pairs of this architecture are neighbours in a file, but halves of a head in transformers.
            for part in "qk":
                block[f"attn_{part}"] = _pairs(block[f"attn_{part}"])
            experts, router = "block_sparse_moe.experts", "block_sparse_moe.router.weight"
            gate, up = np.split(own["shared_mlp.input_linear.weight"], 2)
            shared = {"gate": gate, "up": up, "down": own["shared_mlp.output_linear.weight"]}
        gates, ups = np.split(own[f"{experts}.gate_up_proj"], 2, axis=1)
        block |= {"ffn_gate_exps": gates, "ffn_up_exps": ups, "ffn_down_exps": own[f"{experts}.down_proj"]}
        block["ffn_gate_inp"] = own[router]
        block |= {f"ffn_{part}_shexp": value for part, value in shared.items()}
        found |= {f"blk.{layer}.{name}.weight": value for name, value in block.items()}
    return found


def _pairs(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(-1, 2, HEAD // 2, EMBEDDING).swapaxes(1, 2).reshape(weight.shape)


def write(architecture: str, name: str, model: PreTrainedModel, keys: dict[str, float]) -> None:
    """Write the GGUF file, with the vocabulary of another golden model."""
    writer = gguf.GGUFWriter(GOLDEN / f"{name}.gguf", architecture)
    writer.add_name(f"tiny-{name}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(SHARED if architecture == "qwen2moe" else WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(BASE)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCAB)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_shared_feed_forward_length(SHARED)
    if architecture == "qwen2moe":
        writer.add_expert_feed_forward_length(WIDTH)
    for key, value in keys.items():
        writer.add_float32(f"{architecture}.{key}", value)
    for key, field in gguf.GGUFReader(GOLDEN / "qwen3moe.gguf").fields.items():
        if key.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor, values in tensors_of(architecture, model).items():
        writer.add_tensor(tensor, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answers(architecture: str, model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Run the model; see fixtures/golden/README.md for the arrays."""
    inputs: list[torch.Tensor] = []
    routers: list[torch.Tensor] = []

    def keep_input(_: Any, args: Any) -> None:
        inputs.append(args[0][0].detach())

    def keep_router(module: Any, args: Any) -> None:
        routers.append(args[0].reshape(-1, EMBEDDING).detach() @ module.weight.T)

    hooks = [layer.register_forward_pre_hook(keep_input) for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(keep_input))
    for layer in model.model.layers:
        router = layer.mlp.gate if architecture == "qwen2moe" else layer.block_sparse_moe.router
        hooks.append(router.register_forward_pre_hook(keep_router))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None].long()).logits[0]
    for hook in hooks:
        hook.remove()
    scores = torch.stack(routers)  # [L, T, N]
    best = scores.topk(TOP_K + 1, dim=-1)
    chosen = scores.softmax(-1).gather(-1, best.indices[..., :TOP_K])
    if architecture == "granitemoe":
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return {
        "tokens": tokens,
        "logits": logits.numpy(),
        "hidden": torch.stack(inputs).numpy(),
        "routing": best.indices[..., :TOP_K].numpy().astype(np.int32),
        "routing_weights": chosen.detach().numpy(),
        "routing_margin": (best.values[..., TOP_K - 1] - best.values[..., TOP_K]).numpy(),
    }


def main() -> None:
    """Make the files; of several token sequences the one whose routing hangs least on rounding."""
    for name, architecture, make in (
        ("qwen2moe", "qwen2moe", qwen2moe),
        ("granitemoe-shared", "granitemoe", granitemoe_shared),
    ):
        model, keys = make()
        model = model.float().eval()
        randomise(model, torch.Generator().manual_seed(len(name)))
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, VOCAB, TOKENS, dtype=np.int32) for _ in range(32)]
        best = max(
            (answers(architecture, model, tokens) for tokens in sequences), key=lambda a: a["routing_margin"].min()
        )
        write(architecture, name, model, keys)
        np.savez_compressed(GOLDEN / f"{name}.npz", **best)
        print(f"{name}: smallest routing margin {best['routing_margin'].min():.4f}")


if __name__ == "__main__":
    main()
