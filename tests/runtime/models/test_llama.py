"""What the golden Mixtral-style model does not show: dense layers, a tied head, scaled rotary frequencies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.gguf.reader import GGUFFile, open_gguf
from tests import reference
from tests.gguf_maker import Tensor, write_gguf
from tests.resident import all_logits, make_resident, read_tensor, relative_error

KEYS: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 40,
}
LAYER = {
    "attn_norm": (48,),
    "attn_q": (48, 48),
    "attn_k": (48, 16),
    "attn_v": (48, 16),
    "attn_output": (48, 48),
    "ffn_norm": (48,),
    "ffn_gate": (48, 96),
    "ffn_up": (48, 96),
    "ffn_down": (96, 48),
}


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape[::-1], np.float32)
    if len(shape) == 1:
        values = 1 + 0.1 * values
    return Tensor(name, shape, data=(values / np.sqrt(shape[0]) if len(shape) > 1 else values).astype("<f4").tobytes())


def dense_llama(path: Path, *, tied: bool, factors: bool, **keys: object) -> GGUFFile:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (48, 40), "output_norm.weight": (48,)}
    if not tied:
        shapes["output.weight"] = (48, 40)
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    tensors = [random_tensor(name, shape, seed) for seed, (name, shape) in enumerate(shapes.items())]
    if factors:
        tensors.append(Tensor("rope_freqs.weight", (4,), data=np.array([1, 1, 3, 8], "<f4").tobytes()))
    return open_gguf(write_gguf(path / "dense.gguf", KEYS | keys, tensors))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("factors", [True, False])
def test_dense_llama_equals_the_reference(tmp_path: Path, tied: bool, factors: bool) -> None:
    file = dense_llama(tmp_path, tied=tied, factors=factors)
    model, _ = make_resident(file)
    tokens = np.arange(20, dtype=np.int32) * 7 % 40
    weights = {name: read_tensor(file, name) for name in file.tensors}
    expected = reference.forward(model.config.facts, weights, tokens, style="norm", base=1e4, eps=1e-5)
    for chunks in ([20], [7, *[1] * 13]):
        assert relative_error(all_logits(model, tokens, chunks), expected).max() < 2e-6


def test_linear_rope_scaling_stretches_positions(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5000.0}
    file = dense_llama(tmp_path, tied=True, factors=False, **keys)
    frequencies = make_resident(file)[0].config.rope.inverse_frequencies
    np.testing.assert_allclose(frequencies, 5000.0 ** (-np.arange(0, 8, 2) / 8) / 4, rtol=1e-7)


def test_a_dense_model_in_thread_pieces(tmp_path: Path) -> None:
    """Threads change no bit of a dense model either."""
    file = dense_llama(tmp_path, tied=False, factors=False)
    tokens = np.arange(20, dtype=np.int32)
    one, three = (all_logits(make_resident(file, threads=threads)[0], tokens, [20]) for threads in (1, 3))
    np.testing.assert_array_equal(one, three)
