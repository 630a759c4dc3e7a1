"""Text to token ids and back, by what the GGUF file itself says.

The `tokenizers` library does the merging. Decoding is done here, because a token is a few bytes and a streaming
decoder has to see bytes, not text, to know where a character ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from strata.errors import UnsupportedModel, UsageError
from strata.runtime.tokenizers.byte_level import ByteLevel
from strata.runtime.tokenizers.sentencepiece import SentencePiece
from strata.runtime.tokenizers.vocabulary import ASKED, KEY, TokenType, no_token, string

_KINDS: dict[str, type[ByteLevel] | type[SentencePiece]] = {"gpt2": ByteLevel, "llama": SentencePiece}


class Tokenizer:
    """One model's tokenizer.

    Parameters
    ----------
    kind : ByteLevel or SentencePiece
        How this file's text becomes ids, and its ids bytes.

    Attributes
    ----------
    bos_id : int or None
        Token that begins a text, where the file names one.
    adds_bos : bool
        Whether the model wants `bos_id` before every text.
    eos_ids : frozenset of int
        Every token that ends an answer.
    bos_token, eos_token : str
        Their texts as stored; empty where the file names none.
    leading_space : bool
        Whether a text gets a space in front, which its first token carries and `decode` takes off again.
    doubts : tuple of str
        What speaks against the file's tokenizer, though it can be used, as sentences.
    """

    def __init__(self, kind: ByteLevel | SentencePiece) -> None:
        vocabulary = kind.vocabulary
        self._kind = kind
        self._vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.adds_bos = kind.adds_bos and vocabulary.bos_id is not None
        self.eos_ids = vocabulary.end_ids
        self.bos_token = vocabulary.text(vocabulary.bos_id)
        self.eos_token = vocabulary.text(vocabulary.eos_id)
        self.leading_space = kind.leading_space
        self.doubts = kind.doubts
        # Two front ends on one model: whether control tokens are read is fixed in each, so calls need no lock.
        self._literal = kind.front_end(vocabulary.of_type(TokenType.USER_DEFINED))
        self._special = kind.front_end(vocabulary.of_type(TokenType.USER_DEFINED, TokenType.CONTROL))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF header describes.

        Parameters
        ----------
        metadata : Mapping
            The header's key-value pairs.

        Raises
        ------
        UnsupportedModel
            Another tokenizer model or pre-tokenizer than the supported ones.
        ModelFileError
            A key is missing or contradicts another.
        """
        return cls(_kind(metadata)(metadata))

    @staticmethod
    def check(metadata: Mapping[str, Any]) -> None:
        """Refuse an unknown tokenizer by the names alone, which takes no time, unlike building one.

        Raises
        ------
        UnsupportedModel, ModelFileError
            As `from_metadata` would for these names.
        """
        if _kind(metadata) is ByteLevel:
            ByteLevel.pre_tokenizer(metadata)

    def __len__(self) -> int:
        """How many tokens the vocabulary has."""
        return len(self._vocabulary.tokens)

    def encode(self, text: str, *, parse_special: bool, begin: bool = False) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        text : str
        parse_special : bool
            Whether control tokens spelled out in the text become their ids (True for a rendered chat template)
            or stay plain text (False for what a person typed). User-defined tokens are always read.
        begin : bool
            Whether this is the start of a sequence: then BOS is put first where the model wants one and the
            text does not already bring it, as many chat templates do.

        Returns
        -------
        list of int

        Raises
        ------
        UsageError
            The text holds lone surrogates, so it is not Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "read the text", f"character {error.start} is not valid Unicode", "Give the text as UTF-8"
            ) from None
        front_end = self._special if parse_special else self._literal
        ids = list(front_end.encode(text, add_special_tokens=False).ids)
        if begin and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; special tokens stand for their own text.

        Raises
        ------
        ModelFileError
            The vocabulary has no such token.
        """
        if not 0 <= token < len(self):
            raise no_token(token, len(self))
        if self._vocabulary.types[token] in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            return self._vocabulary.tokens[token].encode()
        return self._kind.token_bytes(token)

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model and is not meant to be read by people."""
        return self._vocabulary.types[token] == TokenType.CONTROL

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a token sequence from its start; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids))
        return (text.removeprefix(b" ") if self.leading_space else text).decode(errors="replace")


def _kind(metadata: Mapping[str, Any]) -> type[ByteLevel] | type[SentencePiece]:
    name = string(metadata, KEY + "model")
    if name not in _KINDS:
        raise UnsupportedModel(
            ASKED, f"it uses the tokenizer model {name!r}", "Supported: gpt2 (byte-level BPE), llama (SentencePiece)"
        )
    return _KINDS[name]


class StreamDecoder:
    """Turns tokens into text as they come, holding back the bytes of a character until it is whole.

    Parameters
    ----------
    tokenizer : Tokenizer
    continues : bool
        Whether the tokens go on with a text. If not, the space that a text's first token carries is left out, and
        pieces and tail, joined, are what `Tokenizer.decode` gives for all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.leading_space and not continues

    def push(self, token: int) -> str:
        """Text that can be shown after this token; often one word, empty inside a character."""
        text = self._tokenizer.token_bytes(token)
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(b" ")
        return self._decoder.decode(text)

    def finish(self) -> str:
        """What the end of the stream adds: U+FFFD for a character that was cut, else nothing."""
        return self._decoder.decode(b"", final=True)
