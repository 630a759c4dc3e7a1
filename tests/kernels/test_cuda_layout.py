"""How blocks lie on the device, against the types that a file may hold."""

from __future__ import annotations

import pytest

from strata.gguf.types import TensorType
from strata.kernels.cuda_layout import LAYOUTS
from strata.kernels.dequant import can_dequantise


def test_every_type_that_can_be_read_has_a_layout() -> None:
    assert {kind.name for kind in TensorType if can_dequantise(kind.name)} == set(LAYOUTS)


@pytest.mark.parametrize("type_", LAYOUTS)
def test_a_block_is_the_files_and_its_planes_are_all_of_it(type_: str) -> None:
    layout, kind = LAYOUTS[type_], TensorType[type_]
    assert (layout.columns, layout.nbytes) == (kind.block_elements, kind.block_bytes)
    if layout.planes:
        fields = sorted(layout.planes)
        assert [offset for offset, _ in fields] == [sum(size for _, size in fields[:i]) for i in range(len(fields))]
        assert sum(size for _, size in fields) == layout.nbytes
    else:
        assert layout.nbytes % 16 == 0 or layout.columns == 1
