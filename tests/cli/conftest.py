"""What the tests of simulated machines share: a tiny model, its answer without a simulation, and counted blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.cli.preflight import OpenModel
from tests.runtime.counted import CountedBlock

from .simulated import CHUNK, GOLDEN, PROMPT, opened, reference


@pytest.fixture(scope="module")
def model() -> OpenModel:
    return opened(GOLDEN / "qwen3moe-Q8_0.gguf")


@pytest.fixture(scope="module")
def answer(model: OpenModel) -> list[bytes]:
    return reference(model.file, PROMPT, chunk=CHUNK)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count every block, whichever backend takes it."""
    CountedBlock.alive = 0
    monkeypatch.setattr("strata.runtime.simulated.HostBlock", CountedBlock)
    monkeypatch.setattr("strata.runtime.memory.HostBlock", CountedBlock)
    yield
    assert CountedBlock.alive == 0
