"""Vocabularies of published models, as the metadata of a GGUF header, and a small one to be made wrong."""

import functools
import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from strata.gguf.reader import open_gguf
from strata.runtime.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
TRIMMED = ("qwen3.6", "deepseek-v3", "gpt-oss", "tekken")


def golden(name: str) -> list[dict[str, Any]]:
    """Return the lines of a golden file."""
    return [json.loads(line) for line in (GOLDEN / name).read_text(encoding="utf-8").splitlines()]


@functools.cache
def published(model: str) -> Tokenizer:
    """Return the tokenizer of a published model."""
    return Tokenizer.from_metadata(header(model))


@functools.cache
def header(model: str) -> dict[str, Any]:
    """Return the metadata that describes the tokenizer of a published model."""
    return _trimmed(model) if model in TRIMMED else _from_gguf(model)


def _from_gguf(model: str) -> dict[str, Any]:
    path = GOLDEN / "vocab" / f"{model}-vocab.gguf"
    if path.exists():
        with open_gguf(path) as file:
            return dict(file.metadata)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / path.name
        with gzip.open(f"{path}.gz") as packed, unpacked.open("wb") as target:
            shutil.copyfileobj(packed, target)
        with open_gguf(unpacked) as file:
            return dict(file.metadata)


def _trimmed(model: str) -> dict[str, Any]:
    """A vocabulary of which only the tokens that can occur in its golden texts are kept.

    Merging a text only ever makes parts of that text, so the others cannot change an id. They are replaced by names
    that no text can spell: their first character stands for no byte.
    """
    kept = json.loads((GOLDEN / "vocab" / f"{model}-trimmed.json").read_text(encoding="utf-8"))
    tokens = [f"␀{i}" for i in range(kept["size"])]
    types = [1] * len(tokens)
    for i, text in kept["tokens"].items():
        tokens[int(i)] = text
    for i, text in kept["control"].items():
        tokens[int(i)], types[int(i)] = text, 3
    keys = {
        "model": "gpt2",
        "pre": kept["pre"],
        "tokens": tokens,
        "token_type": types,
        "merges": kept["merges"],
        "bos_token_id": kept["bos"],
        "eos_token_id": kept["eos"],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


BYTES = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]


def small(**changes: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of all bytes, three merges and two control tokens; a change to None drops a key."""
    tokens = [*BYTES, "12", "123", "ab", "<|begin|>", "<|eot_id|>"]
    metadata = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": np.array([1] * (len(tokens) - 2) + [3, 3], dtype=np.int32),
        "merges": ["1 2", "12 3", "a b"],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def small_sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary with bytes and a few words; a change to None drops a key."""
    words = ["▁", "a", "b", "ab", "▁ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), dtype=np.int32),
        "scores": np.array([0.0] * 259 + [-10, -11, -12, -1, -2, -3], dtype=np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}
