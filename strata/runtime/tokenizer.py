"""Text to token ids and back: byte-level BPE built from what the GGUF file itself says.

The `tokenizers` library does the merging. Decoding is done here, because a byte-level token is a few bytes
and a streaming decoder has to see bytes, not text, to know where a character ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Bpe

from strata.errors import ModelFileError, UnsupportedModel, UsageError

_KEY = "tokenizer.ggml."
_ASKED = "read the model's tokenizer"
_REMEDY = "The file is damaged or was converted wrongly: get it again"

# How text is cut before merging, as published with GPT-2 style models of each family: one pattern, but for the
# number of digits that stay together. SmolLM uses GPT-2's own pattern (the library's default) after single digits.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUPPORTED = ("qwen2", "smollm", "llama-bpe")

# Tokens by which published models end a turn although their files name only one end token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``, as the GGUF specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes
    ----------
    bos_id : int or None
        Token that begins a text, where the file names one.
    adds_bos : bool
        Whether the model wants `bos_id` before every text.
    eos_ids : frozenset of int
        Every token that ends an answer.
    """

    def __init__(
        self,
        tokens: list[str],
        types: list[int],
        merges: list[tuple[str, str]],
        pre: str,
        *,
        bos_id: int | None,
        adds_bos: bool,
        eos_id: int | None,
        eos_ids: frozenset[int],
    ) -> None:
        self._tokens = tokens
        self._types = types
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self.eos_ids = eos_ids
        self.bos_token = "" if bos_id is None else tokens[bos_id]
        self.eos_token = "" if eos_id is None else tokens[eos_id]
        # Llama 3 takes a piece that is itself a token before it tries any merge.
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
        )
        user_defined = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
        control = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
        # Two front ends on one model: whether control tokens are read is fixed in each, so calls need no lock.
        self._literal = _front_end(model, pre, user_defined)
        self._special = _front_end(model, pre, user_defined + control)

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
        kind = _string(metadata, _KEY + "model")
        if kind != "gpt2":
            raise UnsupportedModel(
                _ASKED, f"it uses the tokenizer model {kind!r}", "Supported: 'gpt2' (byte-level BPE)"
            )
        pre = _string(metadata, _KEY + "pre")
        if pre not in _SUPPORTED:
            supported = ", ".join(map(repr, _SUPPORTED))
            raise UnsupportedModel(_ASKED, f"its pre-tokenizer is {pre!r}", f"Supported: {supported}")
        tokens = _strings(metadata, _KEY + "tokens")
        types = _types(metadata, len(tokens))
        known = set(tokens)
        if len(known) != len(tokens):
            raise _broken(f"{len(tokens) - len(known):,} of its {len(tokens):,} tokens occur twice")
        control = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.CONTROL}
        ends = [_token_id(metadata, key, len(tokens)) for key in _END_KEYS]
        named = [control.get(token) for token in _END_OF_TURN]
        bos_id = _token_id(metadata, "bos_token_id", len(tokens))
        return cls(
            tokens,
            types,
            _merges(metadata, known),
            pre,
            bos_id=bos_id,
            # Files of Llama 3 often leave the key out, and the model expects a BOS all the same.
            adds_bos=bos_id is not None and bool(metadata.get(_KEY + "add_bos_token", pre == "llama-bpe")),
            eos_id=ends[0],
            eos_ids=frozenset(i for i in (*ends, *named) if i is not None),
        )

    def __len__(self) -> int:
        """How many tokens the vocabulary has."""
        return len(self._tokens)

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
        if not 0 <= token < len(self._tokens):
            raise ModelFileError(f"decode token {token}", f"the vocabulary has {len(self._tokens):,} tokens", _REMEDY)
        text = self._tokens[token]
        if self._types[token] in (TokenType.CONTROL, TokenType.USER_DEFINED):
            return text.encode()
        return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)

    def is_control(self, token: int) -> bool:
        """Whether a token steers the model and is not meant to be read by people."""
        return self._types[token] == TokenType.CONTROL

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a token sequence; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class StreamDecoder:
    """Turns tokens into text as they come, holding back the bytes of a character until it is whole.

    The pieces and the tail, joined, are what `Tokenizer.decode` gives for all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that can be shown after this token; often one word, empty inside a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What the end of the stream adds: U+FFFD for a character that was cut, else nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_table() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte, backwards: visible Latin-1 is itself, the rest follows U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    stand_ins = {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    return {char: bytes([byte]) for byte, char in stand_ins.items()}


_BYTE_OF = _byte_table()


def _front_end(model: models.BPE, pre: str, added: list[str]) -> Bpe:
    """What happens around the merging: normalise, find added tokens, cut, map bytes to characters."""
    front_end = Bpe(model)
    if pre == "qwen2":
        front_end.normalizer = normalizers.NFC()
    cut: pre_tokenizers.PreTokenizer
    if pre == "smollm":
        cut = pre_tokenizers.Digits(individual_digits=True)
    else:
        pattern = _SPLIT.replace("DIGITS", r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}")
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    front_end.pre_tokenizer = pre_tokenizers.Sequence([cut, to_characters])
    front_end.add_tokens([AddedToken(token, normalized=False) for token in added])
    return front_end


def _broken(found: str) -> ModelFileError:
    return ModelFileError(_ASKED, found, _REMEDY)


def _value(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise _broken(f"the file has no key {key}")
    return metadata[key]


def _string(metadata: Mapping[str, Any], key: str) -> str:
    value = _value(metadata, key)
    if not isinstance(value, str):
        raise _broken(f"{key} is not a string")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = _value(metadata, key)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _broken(f"{key} is not a list of strings")
    strings = list(value)
    if not strings or not all(isinstance(item, str) for item in strings):
        raise _broken(f"{key} is empty or holds something other than strings")
    return strings


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Type of each token; a file without the key has normal tokens only."""
    value = metadata.get(_KEY + "token_type", [TokenType.NORMAL] * count)
    try:
        types = [int(item) for item in value]
    except (TypeError, ValueError):
        raise _broken(f"{_KEY}token_type is not a list of integers") from None
    if len(types) != count:
        raise _broken(f"there are {count:,} tokens but {len(types):,} token types")
    return types


def _merges(metadata: Mapping[str, Any], known: set[str]) -> list[tuple[str, str]]:
    """Merge pairs, each checked to join known tokens into a known one: the library aborts on others."""
    pairs = []
    for rank, merge in enumerate(_strings(metadata, _KEY + "merges")):
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known or not left or not right:
            raise _broken(f"merge {rank:,} ({merge[:80]!r}) does not join two tokens of the vocabulary into a third")
        pairs.append((left, right))
    return pairs


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """A special token's id, None where the file does not name it."""
    value = metadata.get(_KEY + name)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise _broken(f"{_KEY}{name} is {value!r}, outside the vocabulary of {count:,} tokens")
    return value
