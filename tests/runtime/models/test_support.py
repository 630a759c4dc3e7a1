"""Every refusal by name, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata.errors import ExitCode, StrataError, UnsupportedModel
from strata.gguf.reader import open_gguf
from strata.gguf.types import TensorType
from strata.kernels.ops import RopeStyle
from strata.runtime.models import ModelConfig, load_config
from tests.gguf_maker import Tensor, moe_model, write_gguf
from tests.resident import GOLDEN

Keys = dict[str, object]


def load(path: Path, keys: Keys, tensors: list[Tensor]) -> ModelConfig:
    """Only the header is there: a refusal must not need the weights."""
    with open_gguf(write_gguf(path / "made.gguf", keys, tensors, weights=False), header_only=True) as file:
        return load_config(file)


def test_a_sound_model_is_accepted(tmp_path: Path) -> None:
    keys, tensors = moe_model()
    config = load(tmp_path, keys, tensors)
    assert (config.facts.architecture, config.normalise, config.rope.style) == ("qwen3moe", True, RopeStyle.NEOX)
    assert config.rope.dims == 32
    assert config.eps == pytest.approx(1e-6)
    np.testing.assert_allclose(config.rope.inverse_frequencies, 1e6 ** (-np.arange(16) / 16), rtol=1e-7)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.scaling.type", "none"), ("expert_gating_func", 1), ("expert_group_count", 1), ("rope.dimension_count", 16)],
)
def test_keys_that_change_nothing_are_accepted(tmp_path: Path, key: str, value: object) -> None:
    keys, tensors = moe_model()
    load(tmp_path, keys | {f"qwen3moe.{key}": value}, tensors)


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({}, 1),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 4.0}, 4),  # older files name no type: linear
        ({"scaling.factor": 4.0, "scaling.original_context_length": 2048, "scaling.finetuned": True}, 4),
        ({"scale_linear": 2.0}, 2),  # its name in the oldest files
        ({"scale_linear": 2.0, "scaling.factor": 4.0}, 4),
        ({"scaling.type": "linear"}, 1),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, 1),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1),
        ({"scaling.type": "none", "scaling.yarn_beta_fast": 32.0, "scaling.yarn_ext_factor": 0.0}, 1),
    ],
)
def test_positions_are_divided_by_the_rope_factor(tmp_path: Path, rope: Keys, factor: float) -> None:
    keys, tensors = moe_model()
    config = load(tmp_path, keys | {f"qwen3moe.rope.{key}": value for key, value in rope.items()}, tensors)
    np.testing.assert_allclose(config.rope.inverse_frequencies, 1e6 ** (-np.arange(16) / 16) / factor, rtol=1e-7)


def test_normalisation_can_be_off(tmp_path: Path) -> None:
    keys, tensors = moe_model()
    assert not load(tmp_path, keys | {"qwen3moe.expert_weights_norm": False}, tensors).normalise


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rope.scaling.type", "yarn", "'yarn'; those implemented are none and linear"),
        ("rope.scaling.factor", -2.0, "rope.scaling.factor is -2.0"),
        ("rope.scaling.attn_factor", 1.5, "rope.scaling.attn_factor is 1.5"),
        ("rope.scaling.yarn_ext_factor", 1.0, "rope.scaling.yarn_ext_factor is 1.0"),
        ("rope.scaling.yarn_attn_factor", 0.5, "rope.scaling.yarn_attn_factor is 0.5"),
        ("rope.scaling.yarn_log_multiplier", 0.25, "rope.scaling.yarn_log_multiplier is 0.25"),
        ("rope.scaling.alpha", 1000.0, "rope.scaling.alpha is 1000.0"),
        ("rope.freq_base_swa", 10000.0, "rope.freq_base_swa is 10000.0"),
        ("rope.dimension_sections", np.array([16, 24, 24, 0], np.int32), "rope.dimension_sections is [16 24 24  0]"),
        ("rope.freq_scale", 0.25, "rope.freq_scale is not known"),
        ("rope.dimension_count", 33, "dimension_count is 33"),
        ("rope.freq_base", -1.0, "rope.freq_base is -1.0"),
        ("expert_gating_func", 2, "expert_gating_func is 2 (sigmoid)"),
        ("expert_group_count", 8, "expert_group_count is 8"),
        ("expert_group_used_count", 4, "expert_group_used_count is 4"),
        ("expert_weights_scale", 2.5, "expert_weights_scale is 2.5"),
        ("expert_shared_count", 1, "expert_shared_count is 1"),
        ("attention.sliding_window", 128, "attention.sliding_window is 128"),
        ("attention.sliding_window", np.array([1, 2], np.int32), "attention.sliding_window is [1 2]"),
        ("attention.scale", 0.5, "attention.scale is 0.5"),
        ("attention.causal", False, "attention.causal is False"),
        ("attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon is 0.0"),
        ("attention.head_count_kv", np.array([1, 2], np.int32), "KV heads are not implemented"),
        ("logit_scale", 16.0, "logit_scale is 16.0"),
        ("embedding_scale", 12.0, "embedding_scale is 12.0"),
        ("residual_scale", 0.5, "residual_scale is 0.5"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
        ("nextn_predict_layers", 1, "nextn_predict_layers is 1"),
    ],
)
def test_a_key_is_refused_by_name(tmp_path: Path, key: str, value: object, words: str) -> None:
    keys, tensors = moe_model()
    with pytest.raises(UnsupportedModel) as refusal:
        load(tmp_path, keys | {f"qwen3moe.{key}": value}, tensors)
    assert words in refusal.value.found
    assert refusal.value.asked == "run model made.gguf"
    assert refusal.value.exit_code is ExitCode.FAILED


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    keys, tensors = moe_model(architecture="glm4moe")
    known = "granitemoe, llama, olmoe, qwen2moe, qwen3moe"
    with pytest.raises(UnsupportedModel, match=f"'glm4moe' is not implemented; those that are: {known}"):
        load(tmp_path, keys, tensors)


def test_a_missing_epsilon_is_refused(tmp_path: Path) -> None:
    keys, tensors = moe_model()
    del keys["qwen3moe.attention.layer_norm_rms_epsilon"]
    with pytest.raises(UnsupportedModel, match="layer_norm_rms_epsilon is missing"):
        load(tmp_path, keys, tensors)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.bias", (64,)),
        ("blk.1.ffn_gate_exps.scale", (4,)),  # of NVFP4
        ("blk.0.attn_qkv.weight", (64, 128)),
        ("rope_freqs.weight", (16,)),  # Llama's; Qwen3 MoE would not use it
        ("blk.2.attn_norm.weight", (64,)),  # a layer beyond the last
        ("blk.0.attn_sinks.weight", (2,)),
    ],
)
def test_a_tensor_without_a_use_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    keys, tensors = moe_model()
    with pytest.raises(UnsupportedModel, match=name) as refusal:
        load(tmp_path, keys, [*tensors, Tensor(name, shape)])
    assert "no use" in refusal.value.found
    assert "more" not in refusal.value.found
    with pytest.raises(UnsupportedModel, match=r"and 2 more"):
        load(tmp_path, keys, [*tensors, Tensor(name, shape), Tensor("mystery.a", (1,)), Tensor("mystery.b", (1,))])


def golden_header(name: str, **changes: object) -> tuple[Keys, list[Tensor]]:
    """Keys, with the architecture's own replaced by `changes` (None: left out), and tensors of a golden model."""
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        keys = {key: file.metadata.get(key) for key in file.metadata if not key.startswith("tokenizer.ggml.")}
        tensors = [Tensor(tensor.name, tensor.shape, tensor.type) for tensor in file.tensors.values()]
    prefix = keys["general.architecture"]
    keys |= {f"{prefix}.{key}": value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not None}, tensors


def test_what_granites_keys_say(tmp_path: Path) -> None:
    scales = load(tmp_path, *golden_header("granitemoe")).scales
    assert (scales.attention, scales.embedding) == (0.0625, 12.0)
    assert (scales.residual, scales.logits) == pytest.approx((0.22, 1 / 6))
    left_out = {"attention.scale": None, "embedding_scale": 0.0, "residual_scale": None}
    scales = load(tmp_path, *golden_header("granitemoe", **left_out)).scales
    assert (scales.attention, scales.embedding, scales.residual) == (32**-0.5, 1.0, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("logit_scale", None, "logit_scale is missing"),
        ("logit_scale", 0.0, "logit_scale is 0.0, not a positive number"),
        ("residual_scale", -1.0, "residual_scale is -1.0, not a positive number"),
        ("rope.scaling.finetuned", False, "rope.scaling.finetuned is False"),
        ("expert_shared_feed_forward_length", 24, "blk.0.ffn_gate_shexp.weight is missing"),
    ],
)
def test_what_granite_has_no_use_for_is_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        load(tmp_path, *golden_header("granitemoe", **{key: value}))
    assert words in refusal.value.found


@pytest.mark.parametrize("name", ["olmoe", "qwen2moe"])
def test_weights_as_the_softmax_has_them(tmp_path: Path, name: str) -> None:
    assert not load(tmp_path, *golden_header(name)).normalise
    assert load(tmp_path, *golden_header(name, expert_weights_norm=True)).normalise


def test_a_shared_expert_is_as_wide_as_the_key_says(tmp_path: Path) -> None:
    keys, tensors = golden_header("qwen2moe", expert_shared_feed_forward_length=None)
    assert load(tmp_path, keys, tensors).facts.shared_width == 48
    keys, tensors = golden_header("qwen2moe", expert_shared_feed_forward_length=64)
    with pytest.raises(UnsupportedModel, match=r"ffn_gate_shexp.weight has shape \[64, 48\], not \[64, 64\]"):
        load(tmp_path, keys, tensors)


def changed(tensors: list[Tensor], name: str, change: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    assert any(tensor.name == name for tensor in tensors)
    return [new for tensor in tensors for new in (change(tensor) if tensor.name == name else [tensor])]


@pytest.mark.parametrize("name", ["blk.1.attn_k_norm.weight", "output_norm.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    keys, tensors = moe_model()
    with pytest.raises(UnsupportedModel, match=f"{name} is missing"):
        load(tmp_path, keys, changed(tensors, name, lambda tensor: []))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_down_exps.weight"])
def test_a_misshapen_tensor_is_refused(tmp_path: Path, name: str) -> None:
    keys, tensors = moe_model()
    with pytest.raises(UnsupportedModel, match=f"{name} has shape") as refusal:
        load(tmp_path, keys, changed(tensors, name, lambda t: [replace(t, shape=(2 * t.shape[0], *t.shape[1:]))]))
    assert ", not [" in refusal.value.found


@pytest.mark.parametrize("kind", [TensorType.Q8_1, TensorType.I32, TensorType.F64])
def test_a_type_that_cannot_be_read_is_refused(tmp_path: Path, kind: TensorType) -> None:
    keys, tensors = moe_model()
    with pytest.raises(UnsupportedModel, match=f"blk.0.attn_q.weight is {kind.name}, which is not implemented"):
        load(tmp_path, keys, changed(tensors, "blk.0.attn_q.weight", lambda t: [replace(t, type=kind)]))


def test_every_refusal_says_what_to_do(tmp_path: Path) -> None:
    keys, tensors = moe_model(architecture="unheard-of")
    with pytest.raises(StrataError) as refusal:
        load(tmp_path, keys, tensors)
    assert "strata plan" in refusal.value.remedy
