from gguf.constants import GGML_QUANT_SIZES

from strata.gguf.types import TensorType


def test_every_type_that_gguf_py_knows_with_its_block() -> None:
    theirs = {(int(kind), kind.name): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {(int(kind), kind.name): (kind.block_elements, kind.block_bytes) for kind in TensorType}
    assert theirs.items() <= ours.items()
