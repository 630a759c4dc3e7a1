"""The engine's way on a GPU, its kernels' own sources run on this CPU: right answers by plan, loader and graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from tests.kernels.host import NEEDED, kernels_on_host
from tests.resident import GOLDEN
from tests.runtime.plans import planned as planned_for_cpu

from .test_simulated import planned

pytestmark = NEEDED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host-engine")


@pytest.mark.parametrize(
    ("name", "kv", "slots"),
    [
        ("qwen3moe-IQ3_S", "int8", None),
        ("qwen3moe-IQ3_S", "f16", 3),
        ("qwen2moe", "f32", None),
        ("olmoe", "f32", None),
        ("granitemoe-shared", "f32", None),
    ],
)
def test_the_logits_are_numpys(
    name: str, kv: str, slots: int | None, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    tokens = np.load(GOLDEN / f"{name}.npz")["tokens"][:13].tolist()
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        with Engine.load(file, planned_for_cpu(file, max_context=64, kv=kv)) as engine:
            expected = [engine.prefill(tokens[:9]).copy(), *(engine.decode(token).copy() for token in tokens[9:])]
        with (
            kernels_on_host(monkeypatch, folder, 2 << 30),
            Engine.load(file, planned(file, kv=kv, expert_cache=slots)) as engine,
        ):
            found = [engine.prefill(tokens[:9]).copy(), *(engine.decode(token).copy() for token in tokens[9:])]
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
    print(f"{name}, {kv}, {slots} slots: {max(errors):.1e}")
    assert max(errors) < 1e-4
