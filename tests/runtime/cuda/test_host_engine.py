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


@pytest.mark.parametrize(("kv", "slots"), [("int8", None), ("f16", 3)])
def test_the_logits_are_numpys(kv: str, slots: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = np.load(GOLDEN / "qwen3moe-IQ3_S.npz")["tokens"][:13].tolist()
    with open_gguf(GOLDEN / "qwen3moe-IQ3_S.gguf") as file:
        with Engine.load(file, planned_for_cpu(file, max_context=64, kv=kv)) as engine:
            expected = [engine.prefill(tokens[:9]).copy(), *(engine.decode(token).copy() for token in tokens[9:])]
        with (
            kernels_on_host(monkeypatch, tmp_path, 2 << 30),
            Engine.load(file, planned(file, kv=kv, expert_cache=slots)) as engine,
        ):
            found = [engine.prefill(tokens[:9]).copy(), *(engine.decode(token).copy() for token in tokens[9:])]
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
    print(f"{kv}, {slots} slots: {max(errors):.1e}")
    assert max(errors) < 1e-4
