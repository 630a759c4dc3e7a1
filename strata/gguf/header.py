"""The header of one GGUF file: magic, version, metadata, tensor index, and whether the index makes sense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from mmap import mmap

from strata.gguf.cursor import Cursor
from strata.gguf.metadata import Metadata, read_metadata
from strata.gguf.tensors import TensorInfo, read_tensors
from strata.gguf.wording import CONVERT_AGAIN, shown

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_FILE_BYTES = 1 << 56  # keeps every sum over a hostile header within 64 bits


@dataclass(frozen=True)
class Header:
    """What the header of one file says; tensor offsets count from the start of the file."""

    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    alignment: int
    nbytes: int  # without the padding in front of the data
    data_end: int  # where the last tensor ends


def read_header(buffer: bytes | mmap, asked: str, shard: int) -> Header:
    """Read and check the header of one file.

    Parameters
    ----------
    buffer : bytes or mmap
        The file, or its first part as long as that holds the whole header.
    asked : str
        What is being attempted, for error messages.
    shard : int
        Index of this file in its set.

    Raises
    ------
    ModelFileError
        When anything in the header is damaged, unknown or contradictory.
    """
    cursor = Cursor(buffer, asked)
    if bytes(cursor.buffer[: len(MAGIC)]) != MAGIC:
        cursor.fail(*_not_gguf(bytes(cursor.buffer[:512])))
    cursor.position = len(MAGIC)
    version = _read_version(cursor)
    tensor_count = cursor.u64("the number of tensors")
    metadata = read_metadata(cursor, cursor.u64("the number of metadata keys"))
    alignment = _alignment(cursor, metadata)
    tensors = read_tensors(cursor, tensor_count, shard)
    nbytes = cursor.position
    data_start = -(-nbytes // alignment) * alignment
    placed = tuple(replace(tensor, offset=data_start + tensor.offset) for tensor in tensors)
    data_end = _check_layout(cursor, placed, alignment)
    return Header(version, metadata, placed, alignment, nbytes, max(data_end, nbytes))


def _not_gguf(start: bytes) -> tuple[str, str]:
    """Say what a file that does not begin with the magic number is, and what helps."""
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer, not the model itself", "Fetch the model with: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return (
            "this is a web page, not a GGUF file",
            "Download the file itself, not the page that shows it: its address says resolve, not blob",
        )
    if start.startswith(b"PK\x03\x04"):
        return "this is a ZIP archive (perhaps a PyTorch checkpoint), not a GGUF file", "Give a .gguf file"
    if not start.strip(b"\0"):
        return "the file begins with zeros: a download that has not finished", "Finish or repeat the download"
    return f"the file begins with {start[:4]!r}, not with b'GGUF'", "Give a .gguf file"


def _read_version(cursor: Cursor) -> int:
    version = cursor.u32("the version")
    if version in SUPPORTED_VERSIONS:
        return version
    if version == 1:
        cursor.fail("this is GGUF version 1, which nobody writes since August 2023", CONVERT_AGAIN)
    if version & 0xFFFF == 0:
        cursor.fail("this is a big-endian GGUF file", "Give a little-endian one; gguf-convert-endian converts it")
    cursor.fail(f"this is GGUF version {version}; versions 2 and 3 are supported", "Update Strata")


def _alignment(cursor: Cursor, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"metadata key 'general.alignment' is {shown(alignment)}, not a power of two")
    return alignment


def _check_layout(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> int:
    """Refuse misaligned or overlapping tensors and names that repeat; return where the last tensor ends."""
    names: set[str] = set()
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            cursor.fail(f"tensor {shown(tensor.name)} is there twice")
        names.add(tensor.name)
        if tensor.offset % alignment:
            cursor.fail(f"{shown(tensor.name)} begins at byte {tensor.offset}, not at a multiple of {alignment}")
        if tensor.offset < end:
            cursor.fail(f"tensors {shown(last)} and {shown(tensor.name)} overlap")
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if end > MAX_FILE_BYTES:
            cursor.fail(f"tensor {shown(last)} reaches to byte {end}, past the end of any file")
    return end
