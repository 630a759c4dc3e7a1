"""Memory that the driver has moved out of VRAM is found and told of, by line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from tests.resident import GOLDEN

from .simulated_cupy import Runtime, simulated_cuda
from .test_simulated import CAPACITY, planned


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with simulated_cuda(monkeypatch, CAPACITY) as runtime:
        yield runtime


def test_what_lies_behind_the_link_is_named(cuda: Runtime) -> None:
    with open_gguf(GOLDEN / "qwen3moe-IQ3_S.gguf") as file:
        plan = planned(file)
        large = {line.id: line for line in plan.reservations if line.bytes >= 4 << 20}
        assert "workspace" in large
        with Engine.load(file, plan) as engine:
            assert engine.notes == ()
        free = cuda.malloc

        def malloc(nbytes: int) -> int:
            pointer = free(nbytes)
            if nbytes == large["workspace"].bytes:
                cuda.moved_out.add(pointer)
            return pointer

        cuda.malloc = malloc  # type: ignore[method-assign]
        with Engine.load(file, plan) as engine:
            (note,) = engine.notes
    assert "(workspace) are not in VRAM" in note
    assert "--vram-reserve-mib" in note


def test_memory_that_is_ram_anyway_is_not(cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.runtime.cuda.device import CudaDevice

    monkeypatch.setattr(CudaDevice, "integrated", True)
    malloc = cuda.malloc
    cuda.malloc = lambda nbytes: cuda.moved_out.add(pointer := malloc(nbytes)) or pointer  # type: ignore[method-assign, func-returns-value]
    with open_gguf(GOLDEN / "qwen3moe-IQ3_S.gguf") as file, Engine.load(file, planned(file)) as engine:
        assert engine.notes == ()
