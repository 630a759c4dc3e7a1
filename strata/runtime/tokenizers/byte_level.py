"""Byte-level BPE (``tokenizer.ggml.model`` = gpt2): text is cut, its bytes become characters, characters are merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from strata.errors import UnsupportedModel
from strata.runtime.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from strata.runtime.tokenizers.vocabulary import ASKED, KEY, Vocabulary, merges, string


class ByteLevel:
    """One file's byte-level BPE.

    Parameters
    ----------
    metadata : Mapping
        The header's key-value pairs.

    Raises
    ------
    UnsupportedModel
        The file names a pre-tokenizer that is not in the list.
    ModelFileError
        A key is missing or contradicts another.

    Attributes
    ----------
    doubts : tuple of str
        What speaks against the file, though it can be used, as sentences.
    """

    leading_space = False

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._pre = self.pre_tokenizer(metadata)
        self.vocabulary = Vocabulary.from_metadata(metadata)
        tokens = self.vocabulary.tokens
        pairs, idle = merges(metadata, tokens)
        self.doubts: tuple[str, ...] = ()
        if idle:
            self.doubts = (
                f"{idle:,} of the tokenizer's {len(pairs) + idle:,} merges make no token and are left out: the file"
                " may be damaged or made up.",
            )
        self._model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=pairs,
            ignore_merges=self._pre.whole_pieces,
        )
        # Files of Llama 3 often leave the key out, and the model expects a BOS all the same.
        self.adds_bos = bool(metadata.get(KEY + "add_bos_token", self._pre.adds_bos))

    @staticmethod
    def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
        """Return the pre-tokenizer that a header names.

        Raises
        ------
        UnsupportedModel
            It is not in the list.
        ModelFileError
            The header names none.
        """
        name = string(metadata, KEY + "pre")
        if name not in PRE_TOKENIZERS:
            supported = ", ".join(PRE_TOKENIZERS)
            raise UnsupportedModel(ASKED, f"its pre-tokenizer is {name!r}", f"Supported: {supported}")
        return PRE_TOKENIZERS[name]

    def front_end(self, added: list[str]) -> Tokenizer:
        """Everything from text to ids; `added` tokens are found in the text before it is cut."""
        front_end = Tokenizer(self._model)
        if self._pre.nfc:
            front_end.normalizer = normalizers.NFC()
        to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        front_end.pre_tokenizer = pre_tokenizers.Sequence([self._pre.cutter(), to_characters])
        front_end.add_tokens([AddedToken(token, normalized=False) for token in added])
        return front_end

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no special one stands for."""
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in self.vocabulary.tokens[token])


def _byte_table() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte, backwards: visible Latin-1 is itself, the rest follows U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    return {char: bytes([byte]) for byte, char in stand_ins.items()}


_BYTE_OF = _byte_table()
