"""What the kernels cannot run is named before anything is loaded; no GPU is needed to know it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.errors import UnsupportedModel
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.kernels.cuda_layout import SHARED_MEMORY
from strata.runtime.cuda.support import check_cuda, why_not
from tests.tiny_model import TinyModel

GOLDEN = Path(__file__).parents[3] / "fixtures" / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_the_golden_models_can_be_run(path: Path) -> None:
    with open_gguf(path) as file:
        assert why_not(file, read_model_facts(file), "f16") is None


def test_a_kv_cache_without_kernel_is_refused_with_the_option_that_helps() -> None:
    with open_gguf(GOLDEN / "qwen3moe.gguf") as file, pytest.raises(UnsupportedModel, match="Use --kv f16"):
        check_cuda(file, read_model_facts(file), "int8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"top_k": 2, "width": 14336},
            "2 experts of 14,336 values take 165,376 bytes of shared memory; .* has 101,376",
        ),
        ({"experts": 0, "width": 20480}, "tensor blk.0.ffn_down.weight take 119,296 bytes"),
    ],
)
def test_rows_that_a_small_gpus_blocks_cannot_hold_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = TinyModel(architecture="llama", layers=1, embedding=32, vocab=8, experts=2, head_size=16, heads=2)
    with open_gguf(replace(model, **changes).write(tmp_path / "tiny.gguf")) as file:
        facts = read_model_facts(file)
        assert why_not(file, facts, "f16", SHARED_MEMORY["9.0"]) is None
        with pytest.raises(UnsupportedModel, match=words):
            check_cuda(file, facts, "f16", SHARED_MEMORY["8.9"])


@pytest.mark.parametrize("part", ["expert_type", "down_type", "dense_type"])
def test_a_type_without_kernel_is_named(part: str, tmp_path: Path) -> None:
    with open_gguf(TinyModel(**{part: "Q5_0"}).write(tmp_path / "tiny.gguf")) as file:
        found = why_not(file, read_model_facts(file), "f16")
        assert found is not None
        assert "is Q5_0" in found
        with pytest.raises(UnsupportedModel, match="--device cpu"):
            check_cuda(file, read_model_facts(file), "f16")
