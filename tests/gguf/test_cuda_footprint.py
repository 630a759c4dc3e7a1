"""Bytes on a CUDA device, against figures reported for released models."""

from strata.gguf import cuda_footprint, cuda_prompt_footprint
from strata.kernels.cuda_layout import ATTENTION_SPLITS, MOST_TOKENS, PROMPT_TILE_ROWS, SAMPLE_STRETCH, partial_size
from tests.doctor.shapes import FLASH_NEXT, Q3_30B


def test_kv_of_30b_is_96_kib_a_token_in_f16_and_a_little_over_half_in_int8():
    assert cuda_footprint.kv_cache_size(Q3_30B, 1000, "f16").bytes == 1000 * 96 * 1024
    assert cuda_footprint.kv_cache_size(Q3_30B, 1000, "int8").bytes == 1000 * (48 + 1.5) * 1024


def test_the_scratch_of_attention_is_what_the_kernels_want():
    for chunk, tokens in ((1, 1), (8, 8), (512, 8)):
        sizes = {spec.name: spec.shape for spec in cuda_footprint.workspace(Q3_30B, chunk)}
        assert sizes["ops.partial"] == (partial_size(tokens, Q3_30B.heads, Q3_30B.value_length),)
    constants = (cuda_footprint.CALL_TOKENS, cuda_footprint.ATTENTION_SPLITS, cuda_footprint.SAMPLE_STRETCH)
    assert constants == (MOST_TOKENS, ATTENTION_SPLITS, SAMPLE_STRETCH)


def test_the_workspace_of_a_large_model_is_small():
    assert cuda_footprint.workspace_size(FLASH_NEXT, 8).bytes < 16 << 20
    assert cuda_footprint.host_io_size(Q3_30B, 8).bytes < 48 << 20


def test_what_a_chunk_of_30b_works_in_by_hand():
    """2,048 tokens; width 2048, 32 heads and 4 KV heads of 128; 8 of 128 experts of 768; 48 layers."""
    assert PROMPT_TILE_ROWS[0] == cuda_prompt_footprint.LEAST_TILE_ROWS
    pairs = 2048 * 8
    by_hand = {
        "inputs": 8320 + 2048 * 2048 // 256 * 144,  # position and tokens, to 128 bytes; their rows
        "x": 2048 * 2048 * 4,
        "q": 2048 * 4096 * 4,
        "k": 2048 * 512 * 4,
        "v": 2048 * 512 * 4,
        "attended": 2048 * 4096 * 4,
        "split": pairs * 768 * 4,
        "split_sums": pairs * 768 // 16 * 4,
        "split_scales": pairs * 4,
        "counts": 48 * 128 * 4,
        "hidden": 2048 * 2048 * 4,
        "hidden_sums": 2048 * 128 * 4,
        "hidden_scales": 2048 * 4,
        "ids": pairs * 4,
        "weights": pairs * 4,
        "logits": 2048 * 128 * 4,
        "share": 2048 * 4,
        "pairs": pairs * 4,
        "firsts": 128 * 4,
        "tiles": (pairs // 32 + 128) * 16,
        "tile_count": 4,
        "counters": 4,
        "results": pairs * 2048 * 4,
    }
    found = cuda_footprint.workspace(Q3_30B, 2048)
    mine = {spec.name.removeprefix("prompt."): spec.nbytes for spec in found if spec.name.startswith("prompt.")}
    assert mine == by_hand
    assert found[: -len(mine)] == cuda_footprint.workspace(Q3_30B, 8)


def test_weights_keep_their_stored_size_but_for_alignment():
    dense = FLASH_NEXT.dense
    assert 0 <= cuda_footprint.dense_size(FLASH_NEXT).bytes - dense.bytes <= dense.tensors * 256
    assert cuda_footprint.expert_slot_bytes(2_112_000) == 2_112_000
    assert cuda_footprint.expert_slot_bytes(2_112_001) == 2_112_256
