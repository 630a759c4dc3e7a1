"""Bytes on a CUDA device, against figures reported for released models."""

import pytest

from strata.gguf import cuda_footprint
from tests.doctor.shapes import FLASH_NEXT, Q3_30B


def test_kv_of_30b_is_96_kib_a_token_in_f16_and_a_little_over_half_in_int8():
    assert cuda_footprint.kv_cache_size(Q3_30B, 1000, "f16").bytes == 1000 * 96 * 1024
    assert cuda_footprint.kv_cache_size(Q3_30B, 1000, "int8").bytes == 1000 * (48 + 1.5) * 1024


def test_prompt_buffers_are_near_the_reported_430_kb_a_token():
    one, many = (cuda_footprint.workspace_size(FLASH_NEXT, chunk).bytes for chunk in (1, 1001))
    assert (many - one) / 1000 == pytest.approx(430_000, rel=0.15)


def test_weights_keep_their_stored_size_but_for_alignment():
    dense = FLASH_NEXT.dense
    assert 0 <= cuda_footprint.dense_size(FLASH_NEXT).bytes - dense.bytes <= dense.tensors * 256
    assert cuda_footprint.expert_slot_bytes(2_112_000) == 2_112_000
    assert cuda_footprint.expert_slot_bytes(2_112_001) == 2_112_256
