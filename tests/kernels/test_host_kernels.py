"""The tests of the kernels that need a GPU, those of small size, on a CPU: see `tests.kernels.host`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strata.kernels.cuda_layout import LAYOUTS
from strata.kernels.ops import RopeStyle
from tests.kernels.host import NEEDED, kernels_on_host

pytestmark = NEEDED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host-kernels")


@pytest.fixture
def gpu_test(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import one of the modules of tests that need a GPU, with this CPU in its place."""
    with kernels_on_host(monkeypatch, folder):

        def load(name: str) -> ModuleType:
            monkeypatch.delitem(sys.modules, f"tests.kernels.{name}", raising=False)
            return importlib.import_module(f"tests.kernels.{name}")

        yield load
        for name in list(sys.modules):
            if name.startswith("tests.kernels.test_gpu_"):
                del sys.modules[name]


Load = Callable[[str], Any]


@pytest.mark.parametrize("type_", LAYOUTS)
def test_every_type_through_every_op(type_: str, gpu_test: Load) -> None:
    blocks, ops = gpu_test("test_gpu_blocks"), gpu_test("test_gpu_ops")
    for file in ("quants.npz", "quants_bits.npz"):
        if blocks.golden_blocks(type_, file) is not None:
            blocks.test_dequantises_golden_blocks(type_, file)
    ops.test_embed_and_dequantise_random_blocks(type_)
    ops.test_norm_project(type_, 3)
    ops.test_experts_add(type_, type_, 512, 256, 2, 1)
    if type_ in ("F32", "Q3_K", "IQ1_M"):  # which differ in nothing from norm_project but flags
        ops.test_project_add(type_, 768)
        ops.test_large_head_is_walked_whole(type_)


@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("position", [0, 31, 500])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "dims", "style", "normed"),
    [
        (4, 2, 128, 128, RopeStyle.NEOX, True),
        (6, 2, 32, 32, RopeStyle.NORM, False),
        (2, 1, 64, 32, RopeStyle.NEOX, True),
        (2, 1, 256, 64, RopeStyle.NEOX, True),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_attention(
    heads: int,
    groups: int,
    size: int,
    dims: int,
    style: RopeStyle,
    normed: bool,
    dtype: str,
    position: int,
    tokens: int,
    gpu_test: Load,
) -> None:
    ops = gpu_test("test_gpu_ops")
    ops.test_attention(heads, groups, size, dims, style, normed, dtype, tokens, position)


@pytest.mark.parametrize("size", [32, 128])
def test_int8_cells_of_what_is_not_finite(size: int, gpu_test: Load) -> None:
    gpu_test("test_gpu_ops").test_int8_cells_of_what_is_not_finite_are_not_finite(size)


def test_the_other_ops(gpu_test: Load) -> None:
    ops = gpu_test("test_gpu_ops")
    ops.test_norm_rows((128, 64), 3)
    ops.test_scales(0.22)
    ops.test_norm_project_with_biases("Q4_K", 1)
    ops.test_shared_ffn("Q8_0", "Q5_K", 512, 256, True, 5)
    ops.test_dense_ffn(1)
    ops.test_project_add("Q4_K", 256)
    ops.test_project_add("Q8_0", 96)
    ops.test_route(8, 2, 128, 6)
    ops.test_route(60, 4, 256, 1)
    ops.test_route_breaks_ties_by_index()


@pytest.mark.parametrize("type_", LAYOUTS)
def test_every_type_through_a_prompts_product(type_: str, gpu_test: Load) -> None:
    gpu_test("test_gpu_prompt").test_norm_project(type_, 9)


@pytest.mark.parametrize(
    ("heads", "groups", "size", "dims", "style", "normed", "dtype"),
    [
        (4, 2, 128, 128, RopeStyle.NEOX, True, "float16"),
        (2, 1, 64, 64, RopeStyle.NORM, False, "float32"),
        (4, 2, 128, 128, RopeStyle.NEOX, True, "int8"),
        (2, 1, 32, 32, RopeStyle.NORM, False, "int8"),
        (2, 1, 256, 64, RopeStyle.NEOX, True, "int8"),
    ],
)
def test_attention_of_a_prompt(
    heads: int, groups: int, size: int, dims: int, style: RopeStyle, normed: bool, dtype: str, gpu_test: Load
) -> None:
    gpu_test("test_gpu_prompt").test_attention(61, 20, heads, groups, size, dims, style, normed, dtype)


def test_the_other_ops_of_a_prompt(gpu_test: Load) -> None:
    prompt = gpu_test("test_gpu_prompt")
    prompt.test_route_experts_and_a_shared_one(9, 6, 3, "Q4_K", "Q6_K")
    prompt.test_dense_ffn("Q4_0")
    prompt.test_large_and_small_rows_keep_their_digits()
