"""SentencePiece's BPE (``tokenizer.ggml.model`` = llama): whole text is merged by the tokens' scores.

Spaces are written ▁, a text begins with one, and a character without a token becomes its UTF-8 bytes, which have a
token each (byte fallback).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from strata.errors import UnsupportedModel
from strata.runtime.tokenizers.vocabulary import ASKED, KEY, TokenType, Vocabulary, scores

_SPACE = "▁"


class SentencePiece:
    """One file's SentencePiece BPE.

    Parameters
    ----------
    metadata : Mapping
        The header's key-value pairs.

    Raises
    ------
    UnsupportedModel
        The vocabulary has no tokens for single bytes, so not every text can be written.
    ModelFileError
        A key is missing or contradicts another.
    """

    doubts: tuple[str, ...] = ()  # see `ByteLevel`

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.vocabulary = Vocabulary.from_metadata(metadata)
        tokens = self.vocabulary.tokens
        known = set(self.vocabulary.of_type(TokenType.BYTE))
        missing = [text for text in _BYTE_OF if text not in known]
        if missing:
            raise UnsupportedModel(
                ASKED,
                f"its vocabulary lacks byte tokens ({len(missing)} of 256, the first is {missing[0]})",
                "Only SentencePiece vocabularies with byte fallback are supported",
            )
        self.leading_space = bool(metadata.get(KEY + "add_space_prefix", True))
        self.adds_bos = bool(metadata.get(KEY + "add_bos_token", True))
        self._model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(self.vocabulary, scores(metadata, len(tokens))),
            byte_fallback=True,
        )

    def front_end(self, added: list[str]) -> Tokenizer:
        """Everything from text to ids; `added` tokens are found in the text before spaces are rewritten.

        The text after an added token begins with a space again, as the models with these files were trained.
        """
        front_end = Tokenizer(self._model)
        spaces = normalizers.Replace(" ", _SPACE)
        front_end.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if self.leading_space else spaces
        )
        front_end.add_tokens([AddedToken(token, normalized=False) for token in added])
        return front_end

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no special one stands for."""
        text = self.vocabulary.tokens[token]
        if self.vocabulary.types[token] == TokenType.BYTE:
            return _BYTE_OF[text]
        return text.replace(_SPACE, " ").encode()


_BYTE_OF = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _merges(vocabulary: Vocabulary, score: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the best third first.

    SentencePiece joins whatever neighbours make the token of the highest score; a list of merges in that order does
    the same.
    """
    joinable = {
        token: token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    order = sorted(range(len(vocabulary.tokens)), key=lambda i: -score[i])
    return [
        (joinable[token[:at]], joinable[token[at:]])
        for token in (vocabulary.tokens[i] for i in order)
        if token in joinable
        for at in range(1, len(token))
        if token[:at] in joinable and token[at:] in joinable
    ]
