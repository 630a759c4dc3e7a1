"""Rewriting a dense model as a Mixture-of-Experts that computes the same.

A gated feed-forward is a sum over its width: ``down @ (silu(gate h) * up h)``. Cut into N equal parts, each part is an
expert, and the sum of all experts is the whole. A router of zeros gives every expert the weight 1/N, so `down` is
stored times N. Nothing is quantised again: gate and up are cut between rows, down between blocks, and the scales of
down's blocks are multiplied by a power of two, which rounds nothing. All experts are used for every token.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata.errors import ModelFileError, UnsupportedModel
from strata.gguf.reader import GGUFFile, TensorInfo, Value, open_gguf
from strata.gguf.types import TensorType

if TYPE_CHECKING:
    from gguf import GGUFWriter

EXPERTS = 8
_ARCHITECTURE = "llama"
_FEED_FORWARD = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)\.weight")
_BLOCK = TensorType.Q4_1.block_elements
_BLOCK_BYTES = TensorType.Q4_1.block_bytes  # f16 scale, f16 minimum, 16 bytes of 4-bit values


def split_into_experts(source: Path, target: Path, *, name: str, description: str) -> None:
    """Write a dense llama file anew, each feed-forward split into 8 experts.

    Parameters
    ----------
    source : Path
        A dense file of architecture ``llama`` whose feed-forward tensors are Q4_1.
    target : Path
        Where to write; on the disk when this returns, incomplete when it raises.
    name, description : str
        What the new file says of itself; its other general keys are the source's.

    Raises
    ------
    UnsupportedModel
        The source is another kind of model.
    ModelFileError
        The source cannot be read, or a block's scale would leave the range of float16.
    """
    import gguf

    with open_gguf(source) as dense:
        width = _expert_width(dense)
        writer = gguf.GGUFWriter(target, _ARCHITECTURE)
        keys: dict[str, Value] = {
            **dense.metadata,
            "general.name": name,
            "general.description": description,
            # Some readers of Mixtral files take the width of an expert from the first key, some from the second.
            f"{_ARCHITECTURE}.feed_forward_length": width,
            f"{_ARCHITECTURE}.expert_feed_forward_length": width,
            f"{_ARCHITECTURE}.expert_count": EXPERTS,
            f"{_ARCHITECTURE}.expert_used_count": EXPERTS,
        }
        del keys["general.architecture"]  # the writer has put it first
        for key, value in keys.items():
            _add_key(writer, key, value)
        for tensor in dense.tensors.values():
            _add_tensor(writer, tensor, dense.raw(tensor.name))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    with target.open("rb+") as file:
        os.fsync(file.fileno())


def _expert_width(dense: GGUFFile) -> int:
    """Width of one expert; refuses every file that cannot be split exactly."""
    asked = f"split {dense.path.name} into experts"
    remedy = "Only dense llama files with Q4_1 feed-forwards can be split"
    architecture = dense.metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise UnsupportedModel(asked, f"its architecture is {architecture!r}", remedy)
    parts = [tensor for tensor in dense.tensors.values() if _FEED_FORWARD.fullmatch(tensor.name)]
    if not parts:
        raise UnsupportedModel(asked, "it has no dense feed-forward", remedy)
    for tensor in parts:
        if tensor.type is not TensorType.Q4_1:
            raise UnsupportedModel(asked, f"{tensor.name} is {tensor.type.name}", remedy)
    widths = {tensor.shape[0 if ".ffn_down." in tensor.name else 1] for tensor in parts}
    width = widths.pop()
    if widths or width % (EXPERTS * _BLOCK):
        found = f"its feed-forward width is {width}, no multiple of {EXPERTS} experts times {_BLOCK} values a block"
        raise UnsupportedModel(asked, "its feed-forward widths differ" if widths else found, remedy)
    return width // EXPERTS


def _add_key(writer: GGUFWriter, key: str, value: Value) -> None:
    from gguf import GGUFValueType

    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, np.ndarray):
        writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, GGUFValueType[value.dtype.name.upper()])
    elif isinstance(value, int) and not isinstance(value, bool):
        writer.add_key_value(key, value, GGUFValueType.UINT32 if 0 <= value < 1 << 32 else GGUFValueType.INT64)
    else:
        writer.add_key_value(key, value, GGUFValueType.get_type(value))


def _add_tensor(writer: GGUFWriter, tensor: TensorInfo, raw: NDArray[np.uint8]) -> None:
    """Add a tensor as it is, or one third of a feed-forward as that of all experts (and, with gate, the router)."""
    from gguf import GGMLQuantizationType

    match = _FEED_FORWARD.fullmatch(tensor.name)
    rows = tensor.shape[:0:-1]  # NumPy order, without the dimension that lies in blocks
    if not match:
        writer.add_tensor(tensor.name, raw.reshape(*rows, -1), raw_dtype=GGMLQuantizationType(tensor.type))
        return
    layer, part = match.groups()
    if part == "gate":
        router = np.zeros((EXPERTS, tensor.shape[0]), dtype=np.float32)
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", router)
    if part == "down":
        experts = _multiply_scales(raw, tensor.name).reshape(*rows, EXPERTS, -1).swapaxes(0, 1)
    else:
        experts = raw.reshape(EXPERTS, rows[0] // EXPERTS, -1)
    writer.add_tensor(
        f"{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(experts), raw_dtype=GGMLQuantizationType(tensor.type)
    )


def _multiply_scales(raw: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """Q4_1 blocks of `EXPERTS` times the values: value = scale * q + minimum, so both numbers are multiplied."""
    blocks = raw.reshape(-1, _BLOCK_BYTES).copy()
    scales = blocks[:, :4].copy().view("<f2")
    with np.errstate(over="ignore"):
        scaled = scales * np.float16(EXPERTS)
    if not np.array_equal(scaled / np.float16(EXPERTS), scales):
        raise ModelFileError(
            f"multiply {name} by {EXPERTS}", "a block's scale leaves the range of float16", "Use another file"
        )
    blocks[:, :4] = scaled.view(np.uint8)
    return blocks.reshape(-1)
