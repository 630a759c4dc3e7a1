"""What is read is what the file holds, wherever the plan puts it."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from gguf.quants import dequantize

from strata.doctor.plan import AllocationPlan, Tier
from strata.gguf.reader import open_gguf
from strata.kernels.numpy_weights import QuantRows
from strata.runtime import weights as weights_module
from strata.runtime.memory import PlannedMemory
from strata.runtime.weights import Weights
from tests.tiny_model import TinyModel

from .plans import planned


def with_embedding_in(plan: AllocationPlan, tier: Tier) -> AllocationPlan:
    moved = tuple(
        msgspec.structs.replace(line, tier=tier) if line.id == "embedding" else line for line in plan.reservations
    )
    return msgspec.structs.replace(plan, reservations=moved)


@pytest.mark.parametrize("tier", [Tier.PINNED, Tier.PAGEABLE, Tier.FILE])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_reads_as_gguf_py_reads_it(
    tmp_path: Path, tied: bool, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_STEP_ELEMENTS", 1000)  # several steps even here, the last one shorter
    monkeypatch.setattr(weights_module, "_STEP_BYTES", 1000)
    path = TinyModel(dense_type="Q8_0", tied=tied).write(tmp_path / "tiny.gguf")
    expected = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in tensor.shape[::-1]])
        for tensor in gguf.GGUFReader(path).tensors
        if "_exps." not in tensor.name
    }
    table = expected.pop("token_embd.weight")
    if tied:
        expected["output.weight"] = table
    file = open_gguf(path)
    plan = with_embedding_in(planned(file), tier)
    with PlannedMemory(plan) as memory:
        weights = Weights(file, plan, memory)
        steps: list[int] = []
        weights.load(steps.append)
        assert sum(steps) == weights.stored_bytes
        assert max(steps) <= 4000
        assert weights.by_name.keys() == {*expected, "token_embd.weight"}
        for name, values in expected.items():
            np.testing.assert_array_equal(weights.by_name[name], values)
        rows = weights.by_name["token_embd.weight"]
        assert isinstance(rows, QuantRows)
        np.testing.assert_array_equal(dequantize(rows.raw, gguf.GGMLQuantizationType[rows.type]), table)
        assert np.shares_memory(rows.raw, file.raw("token_embd.weight")) == (tier is Tier.FILE)
