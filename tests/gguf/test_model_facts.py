import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strata.errors import ModelFileError
from strata.gguf import cuda_footprint, footprint
from strata.gguf.model_facts import ModelFacts, read_model_facts
from strata.gguf.reader import open_gguf
from strata.gguf.types import TensorType
from tests.gguf_maker import Tensor, moe_model, write_gguf

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"

Change = Callable[[dict[str, object], list[Tensor]], object]


def facts_of(path: Path) -> ModelFacts:
    with open_gguf(path, header_only=True) as file:
        return read_model_facts(file)


def made_facts(tmp_path: Path, change: Change = lambda keys, tensors: None, **shape: int) -> ModelFacts:
    keys, tensors = moe_model(**shape)  # type: ignore[arg-type]
    change(keys, tensors)
    return facts_of(write_gguf(tmp_path / "m.gguf", keys, tensors, weights=False))


def tensor_named(tensors: list[Tensor], name: str) -> int:
    return next(index for index, tensor in enumerate(tensors) if tensor.name == name)


def test_a_quantised_golden_model() -> None:
    facts = facts_of(GOLDEN / "qwen3moe-Q4_K.gguf")
    assert (facts.architecture, facts.name) == ("qwen3moe", "tiny-qwen3moe-Q4_K")
    assert (facts.layers, facts.embedding, facts.heads, facts.kv_heads) == (2, 256, 6, (2, 2))
    assert (facts.key_length, facts.value_length, facts.vocab, facts.context_length) == (64, 64, 256, 4096)
    assert (facts.experts, facts.top_k, facts.expert_width, facts.feed_forward) == (4, 2, 256, 512)
    assert facts.quant_types == ("F32", "Q4_K", "Q8_0")
    (experts,) = facts.expert_classes
    assert (experts.layers, experts.experts_per_layer, experts.types) == ((0, 1), 4, ("Q4_K", "Q4_K", "Q4_K"))
    assert (experts.elements, experts.bytes) == (3 * 256 * 256, 3 * 256 * 256 // 256 * 144)
    assert not facts.tied_head
    assert facts.head.bytes == facts.embedding_table.bytes == 256 * 256 // 32 * 34


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_every_byte_is_in_one_group(path: Path) -> None:
    facts = facts_of(path)
    with open_gguf(path) as file:
        stored = sum(tensor.nbytes for tensor in file.tensors.values())
    routed = sum(kind.bytes * kind.experts_per_layer * len(kind.layers) for kind in facts.expert_classes)
    head = 0 if facts.tied_head else facts.head.bytes
    assert facts.embedding_table.bytes + head + facts.dense.bytes + routed == stored
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ModelFacts) == facts


@pytest.mark.parametrize(("name", "width"), [("qwen2moe", 48), ("granitemoe-shared", 48), ("granitemoe", 0)])
def test_the_width_of_a_shared_expert(name: str, width: int) -> None:
    facts = facts_of(GOLDEN / f"{name}.gguf")
    assert facts.shared_width == width
    for specs in (footprint.workspace(facts, 7, "f32", 2), cuda_footprint.workspace(facts, 7)):
        assert any(width in spec.shape[-1:] for spec in specs if "gate" in spec.name) == bool(width)


def test_a_large_model_from_its_header_alone(tmp_path: Path) -> None:
    facts = made_facts(
        tmp_path,
        layers=48,
        embedding=2048,
        heads=32,
        kv_heads=4,
        head_length=128,
        experts=128,
        top_k=8,
        expert_width=768,
        vocab=1000,
    )
    (experts,) = facts.expert_classes
    assert experts.layers == tuple(range(48))
    assert experts.bytes == 3 * 2048 * 768 // 32 * 18
    assert facts.file_bytes > 48 * 128 * experts.bytes > 1 << 33
    assert facts.header_bytes == (tmp_path / "m.gguf").stat().st_size


def test_defaults_where_keys_are_absent(tmp_path: Path) -> None:
    def change(keys: dict[str, object], tensors: list[Tensor]) -> None:
        for key in ("attention.key_length", "attention.value_length", "expert_feed_forward_length"):
            del keys[f"qwen3moe.{key}"]
        del keys["qwen3moe.attention.head_count_kv"], keys["general.name"]
        del tensors[tensor_named(tensors, "output.weight")]

    facts = made_facts(tmp_path, change, embedding=64, heads=4)
    assert (facts.key_length, facts.value_length) == (16, 16)
    assert facts.kv_heads == (4, 4)
    assert (facts.expert_width, facts.feed_forward) == (32, 128)  # the tensors' own, and the key's
    assert facts.name == "m"
    assert facts.vocab == 40  # the length of the token list
    assert facts.tied_head
    assert facts.head == facts.embedding_table


def test_vocab_size_comes_before_the_token_list(tmp_path: Path) -> None:
    assert made_facts(tmp_path, lambda keys, _: keys.update({"qwen3moe.vocab_size": 64})).vocab == 64


def test_recurrent_layers_keep_states_and_windows(tmp_path: Path) -> None:
    def change(keys: dict[str, object], tensors: list[Tensor]) -> None:
        keys |= {"qwen3moe.ssm.state_size": 16, "qwen3moe.ssm.inner_size": 48, "qwen3moe.ssm.conv_kernel": 4}
        tensors[tensor_named(tensors, "blk.1.attn_k.weight")] = Tensor("blk.1.ssm_conv1d.weight", (4, 80))

    assert made_facts(tmp_path, change, layers=3).recurrent_state_bytes == 4 * (16 * 48 + 3 * 80)
    assert made_facts(tmp_path).recurrent_state_bytes == 0


def test_draft_layers_are_counted_apart(tmp_path: Path) -> None:
    plain = made_facts(tmp_path, layers=2)
    drafted = made_facts(tmp_path, lambda keys, _: keys.update({"qwen3moe.nextn_predict_layers": 1}), layers=3)
    assert drafted.layers == len(drafted.kv_heads) == 2
    assert (drafted.dense, drafted.expert_classes) == (plain.dense, plain.expert_classes)
    layer_bytes = drafted.file_bytes - plain.file_bytes
    assert drafted.draft.bytes == pytest.approx(layer_bytes, rel=0.1)
    assert plain.draft.tensors == 0
    with pytest.raises(ModelFileError, match="nextn_predict_layers"):
        made_facts(tmp_path, lambda keys, _: keys.update({"qwen3moe.nextn_predict_layers": 3}), layers=3)


def test_index_keys_and_row_tables_are_counted_apart(tmp_path: Path) -> None:
    def change(keys: dict[str, object], tensors: list[Tensor]) -> None:
        keys["qwen3moe.attention.indexer.key_length"] = 8
        tensors.append(Tensor("blk.1.indexer.k_proj.weight", (64, 8)))
        tensors.append(Tensor("per_layer_token_embd.weight", (8, 1000)))

    facts = made_facts(tmp_path, change)
    assert facts.index_values == 8
    assert facts.row_tables.elements == 8000
    assert facts.dense.elements == made_facts(tmp_path).dense.elements + 64 * 8


def test_kv_heads_per_layer_and_recurrent_layers(tmp_path: Path) -> None:
    per_layer = {"qwen3moe.attention.head_count_kv": np.array([3, 0, 1], np.int32)}
    assert made_facts(tmp_path, lambda keys, _: keys.update(per_layer), layers=3).kv_heads == (3, 0, 1)

    def change(_: dict[str, object], tensors: list[Tensor]) -> None:
        tensors[tensor_named(tensors, "blk.1.attn_k.weight")] = Tensor("blk.1.ssm_a", (4,))
        tensors.append(Tensor("blk.2.ssm_a", (4,)))  # has attention beside it

    assert made_facts(tmp_path, change, layers=3, kv_heads=2).kv_heads == (2, 0, 2)


def test_layers_quantised_otherwise_are_another_class(tmp_path: Path) -> None:
    def change(_: dict[str, object], tensors: list[Tensor]) -> None:
        down = tensor_named(tensors, "blk.1.ffn_down_exps.weight")
        tensors[down] = Tensor(tensors[down].name, tensors[down].shape, TensorType.Q8_0)

    first, second = made_facts(tmp_path, change, layers=3).expert_classes
    assert (first.layers, first.types) == ((0, 2), ("Q4_0", "Q4_0", "Q4_0"))
    assert (second.layers, second.types) == ((1,), ("Q4_0", "Q4_0", "Q8_0"))
    assert first.elements == second.elements
    assert first.bytes < second.bytes


def test_fused_gate_and_up_biases_and_scales_are_the_experts_own(tmp_path: Path) -> None:
    def change(_: dict[str, object], tensors: list[Tensor]) -> None:
        del tensors[tensor_named(tensors, "blk.0.ffn_up_exps.weight")]
        gate = tensor_named(tensors, "blk.0.ffn_gate_exps.weight")
        tensors[gate] = Tensor("blk.0.ffn_gate_up_exps.weight", (64, 64, 4), TensorType.Q4_1)
        tensors.append(Tensor("blk.0.ffn_down_exps.bias", (64, 4)))
        tensors.append(Tensor("blk.0.ffn_down_exps.scale", (4,)))

    (experts,) = made_facts(tmp_path, change, layers=1).expert_classes
    assert experts.types == ("Q4_1", "Q4_1", "Q4_0")
    assert experts.elements == 3 * 64 * 32 + 64 + 1
    assert experts.bytes == 2 * 64 * 32 // 32 * 20 + 64 * 32 // 32 * 18 + 4 * (64 + 1)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    def change(keys: dict[str, object], tensors: list[Tensor]) -> None:
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            del keys[f"qwen3moe.{key}"]
        tensors[:] = [tensor for tensor in tensors if "_exps" not in tensor.name]

    facts = made_facts(tmp_path, change)
    assert (facts.experts, facts.top_k, facts.expert_width, facts.expert_classes) == (0, 0, 0, ())


def without(key: str) -> Change:
    return lambda keys, _: keys.pop(key)


def with_key(key: str, value: object) -> Change:
    return lambda keys, _: keys.update({key: value})


def without_tensor(name: str) -> Change:
    return lambda _, tensors: tensors.pop(tensor_named(tensors, name))


NEEDED = ["block_count", "context_length", "embedding_length", "attention.head_count", "expert_used_count"]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=f"'qwen3moe.{key}' is missing"):
        made_facts(tmp_path, without(f"qwen3moe.{key}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("general.architecture"), "'general.architecture' is missing"),
        (with_key("general.architecture", 5), "'general.architecture' is not a string"),
        (without("tokenizer.ggml.tokens"), "'qwen3moe.vocab_size' is missing"),
        (with_key("qwen3moe.block_count", 0), "'qwen3moe.block_count' is 0, less than 1"),
        (with_key("qwen3moe.block_count", 2**32 - 1), "block_count' is 4294967295 in a file of 27 tensors"),
        (with_key("qwen3moe.block_count", 1), r"'blk\.1\.ffn_gate_exps\.weight' is of no layer"),
        (with_key("qwen3moe.embedding_length", 2.5), "embedding_length' is 2.5, not a whole number"),
        (with_key("qwen3moe.embedding_length", ["a"] * 9), "embedding_length' is .*, not a whole number"),
        (with_key("qwen3moe.attention.head_count", 0), "head_count' is 0"),
        (with_key("qwen3moe.attention.head_count_kv", [1, 2, 3]), "head_count_kv' has 3 values for 2 layers"),
        (with_key("qwen3moe.attention.head_count_kv", [1, -2]), "head_count_kv' is -2, less than 0"),
        (with_key("qwen3moe.attention.head_count_kv", ["1", "2"]), "head_count_kv' is '1', not a whole number"),
        (
            with_key("qwen3moe.expert_count", 5),
            r"expert_count' is 5; 'blk.0.ffn_gate_exps.weight' of shape \(64, 32, 4\)",
        ),
        (with_key("qwen3moe.expert_count", 0), "expert_count' is 0; .* holds another number"),
        (with_key("qwen3moe.expert_used_count", 5), "expert_used_count' is 5, more than the 4 experts"),
        (without_tensor("token_embd.weight"), "'token_embd.weight' is missing"),
        (without_tensor("blk.1.ffn_up_exps.weight"), "'blk.1.ffn_up_exps.weight' is missing"),
        (lambda _, tensors: tensors.__delitem__(slice(3, None)), "no tensor holds routed experts"),
    ],
)
def test_facts_that_make_no_sense_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        made_facts(tmp_path, change)


def test_a_64_bit_number_is_kept_whole(tmp_path: Path) -> None:
    from tests.gguf_maker import Raw

    huge = Raw(10, struct.pack("<Q", 2**64 - 1))
    facts = made_facts(tmp_path, with_key("qwen3moe.context_length", huge))
    assert facts.context_length == 2**64 - 1
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ModelFacts) == facts


def test_holding_facts_does_not_load_numpy() -> None:
    code = "import sys, strata.gguf.model_facts; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_that_see_a_window_only() -> None:
    headers = Path(__file__).parents[2] / "fixtures" / "headers"
    with open_gguf(headers / "gpt-oss.gguf", header_only=True) as file:
        facts = read_model_facts(file)
    assert (facts.layers, facts.window, facts.windowed_layers) == (2, 16, (0,))
    with open_gguf(headers / "olmoe.gguf", header_only=True) as file:
        assert (read_model_facts(file).window, read_model_facts(file).windowed_layers) == (0, ())
