"""Splitting a dense feed-forward into experts: the same weights to the bit, and the same function."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from strata.errors import ModelFileError, UnsupportedModel
from strata.gguf.reader import GGUFFile, open_gguf
from strata.gguf.types import TensorType
from strata.sources.experts import EXPERTS, split_into_experts
from tests.gguf_maker import Tensor, write_gguf

EMBEDDING, WIDTH = 64, 512


def q4_1(rng: np.random.Generator, name: str, columns: int, rows: int) -> Tensor:
    weights = rng.normal(size=(rows, columns)).astype(np.float32)
    return Tensor(name, (columns, rows), TensorType.Q4_1, quantize(weights, TensorType.Q4_1).tobytes())


def dense(path: Path, *, change: dict[str, Tensor] | None = None, width: int = WIDTH, **keys: Any) -> Path:
    """A little dense llama file; `change` replaces tensors by name."""
    rng = np.random.default_rng(3)
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": "dense",
        "general.license": "apache-2.0",
        "llama.feed_forward_length": width,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": np.array([1, 3], dtype=np.int32),
        "some.offset": np.array([-1, 1 << 40], dtype=np.int64),
    }
    tensors = [
        Tensor("token_embd.weight", (EMBEDDING, 2), TensorType.Q8_0, rng.bytes(2 * 2 * 34)),
        q4_1(rng, "blk.0.ffn_down.weight", width, EMBEDDING),
        q4_1(rng, "blk.0.ffn_gate.weight", EMBEDDING, width),
        q4_1(rng, "blk.0.ffn_up.weight", EMBEDDING, width),
        Tensor("blk.0.ffn_norm.weight", (EMBEDDING,), TensorType.F32, rng.bytes(4 * EMBEDDING)),
    ]
    tensors = [(change or {}).get(tensor.name, tensor) for tensor in tensors]
    return write_gguf(path, metadata | keys, tensors)


def split(source: Path) -> Path:
    target = source.with_name("moe.gguf")
    split_into_experts(source, target, name="new name", description="what it is")
    return target


def weights(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    values = dequantize(file.raw(name).reshape(*tensor.shape[:0:-1], -1), tensor.type)
    return values.reshape(tensor.shape[::-1])


def assert_split_exactly(old: GGUFFile, new: GGUFFile, layer: str) -> None:
    """Every expert's weights are the dense ones, down's times the number of experts, without any rounding."""
    for part in ("gate", "up"):
        whole = weights(old, f"{layer}.ffn_{part}.weight")
        experts = weights(new, f"{layer}.ffn_{part}_exps.weight")
        np.testing.assert_array_equal(np.concatenate(list(experts)), whole)
    whole = weights(old, f"{layer}.ffn_down.weight")
    experts = weights(new, f"{layer}.ffn_down_exps.weight")
    np.testing.assert_array_equal(np.concatenate(list(experts), axis=1), EXPERTS * whole)
    router = weights(new, f"{layer}.ffn_gate_inp.weight")
    assert router.shape == (EXPERTS, whole.shape[0])
    assert not router.any()


def test_weights_are_the_dense_ones(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense.gguf")
    with open_gguf(source) as old, open_gguf(split(source)) as new:
        assert_split_exactly(old, new, "blk.0")
        assert new.tensors["blk.0.ffn_gate_exps.weight"].shape == (EMBEDDING, WIDTH // EXPERTS, EXPERTS)
        assert new.tensors["blk.0.ffn_down_exps.weight"].shape == (WIDTH // EXPERTS, EMBEDDING, EXPERTS)
        assert not any(".ffn_gate.weight" in name for name in new.tensors)


def test_the_function_is_the_dense_one(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense.gguf")
    hidden = np.random.default_rng(4).normal(size=EMBEDDING)

    def feed_forward(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gated = gate @ hidden
        return down @ (gated / (1 + np.exp(-gated)) * (up @ hidden))

    with open_gguf(source) as old, open_gguf(split(source)) as new:
        whole = feed_forward(*(weights(old, f"blk.0.ffn_{part}.weight") for part in ("gate", "up", "down")))
        experts = [weights(new, f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
        logits = weights(new, "blk.0.ffn_gate_inp.weight") @ hidden
    probabilities = np.exp(logits) / np.exp(logits).sum()
    mixed = sum(p * feed_forward(*one) for p, *one in zip(probabilities, *experts, strict=True))
    np.testing.assert_allclose(mixed, whole, rtol=1e-12)


def test_everything_else_is_kept_and_the_rest_says_what_it_is(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense.gguf")
    with open_gguf(source) as old, open_gguf(split(source)) as new:
        for name in ("token_embd.weight", "blk.0.ffn_norm.weight"):
            np.testing.assert_array_equal(new.raw(name), old.raw(name))
            assert new.tensors[name].type is old.tensors[name].type
        changed = {
            "general.name": "new name",
            "general.description": "what it is",
            "llama.feed_forward_length": WIDTH // EXPERTS,
            "llama.expert_feed_forward_length": WIDTH // EXPERTS,
            "llama.expert_count": EXPERTS,
            "llama.expert_used_count": EXPERTS,
        }
        assert set(new.metadata) == set(old.metadata) | set(changed)
        for key in new.metadata:
            np.testing.assert_array_equal(new.metadata[key], changed.get(key, old.metadata.get(key)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"blk.0.ffn_up.weight": Tensor("blk.0.ffn_up.weight", (EMBEDDING, WIDTH), TensorType.Q4_0)}, "is Q4_0"),
        ({"blk.0.ffn_up.weight": Tensor("blk.0.ffn_up.weight", (EMBEDDING, 256), TensorType.Q4_1)}, "widths differ"),
    ],
)
def test_other_feed_forwards_are_refused(tmp_path: Path, change: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        split(dense(tmp_path / "dense.gguf", change=change))


def test_a_width_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="width is 128"):
        split(dense(tmp_path / "dense.gguf", width=128))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'qwen3'"):
        split(dense(tmp_path / "dense.gguf", **{"general.architecture": "qwen3"}))


def test_a_model_that_has_experts_already_is_refused(tmp_path: Path) -> None:
    once = split(dense(tmp_path / "dense.gguf"))
    with pytest.raises(UnsupportedModel, match="no dense feed-forward"):
        split_into_experts(once, tmp_path / "twice.gguf", name="", description="")


@pytest.mark.parametrize("scale", [8192, np.nan])
def test_a_scale_that_cannot_be_multiplied_is_refused(tmp_path: Path, scale: float) -> None:
    block = np.array([scale, 0], dtype="<f2").tobytes() + bytes(16)
    blocks = EMBEDDING * WIDTH // 32
    down = Tensor("blk.0.ffn_down.weight", (WIDTH, EMBEDDING), TensorType.Q4_1, block * blocks)
    with pytest.raises(ModelFileError, match="range of float16"):
        split(dense(tmp_path / "dense.gguf", change={down.name: down}))
