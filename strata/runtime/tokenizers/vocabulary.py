"""What a GGUF header says of a tokenizer, checked: every contradiction is one clear error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from strata.errors import ModelFileError

KEY = "tokenizer.ggml."
ASKED = "read the model's tokenizer"
_REMEDY = "The file is damaged or was converted wrongly: get it again"

# Tokens by which published models end a turn although their files name only one end token.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<|role_end|>",
    "[e~[",
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``, as the GGUF specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and what they are for.

    Attributes
    ----------
    tokens : list of str
        Text of each token as stored, by id.
    types : list of int
        `TokenType` of each token.
    bos_id, eos_id : int or None
        Tokens that begin and end a text, where the file names them.
    end_ids : frozenset of int
        Every token that ends an answer.
    """

    tokens: list[str]
    types: list[int]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Read the vocabulary of a GGUF header.

        Raises
        ------
        ModelFileError
            A key is missing or contradicts another.
        """
        tokens = strings(metadata, KEY + "tokens")
        types = _types(metadata, len(tokens))
        repeated = len(tokens) - len(set(tokens))
        if repeated:
            raise broken(f"{repeated:,} of its {len(tokens):,} tokens occur twice")
        control = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.CONTROL}
        ends = [_token_id(metadata, key, len(tokens)) for key in _END_KEYS]
        named = [control.get(token) for token in _END_OF_TURN]
        return cls(
            tokens,
            types,
            bos_id=_token_id(metadata, "bos_token_id", len(tokens)),
            eos_id=ends[0],
            end_ids=frozenset(i for i in (*ends, *named) if i is not None),
        )

    def of_type(self, *types: TokenType) -> list[str]:
        """Texts of the tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def text(self, token: int | None) -> str:
        """Text of a token as stored; empty for None."""
        return "" if token is None else self.tokens[token]


def broken(found: str) -> ModelFileError:
    """Return the error of a header that contradicts itself."""
    return ModelFileError(ASKED, found, _REMEDY)


def no_token(token: int, count: int) -> ModelFileError:
    """Return the error of an id outside a vocabulary of `count` tokens."""
    return ModelFileError(f"decode token {token}", f"the vocabulary has {count:,} tokens", _REMEDY)


def string(metadata: Mapping[str, Any], key: str) -> str:
    """Read a string."""
    value = _value(metadata, key)
    if not isinstance(value, str):
        raise broken(f"{key} is not a string")
    return value


def strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of at least one string."""
    value = _value(metadata, key)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise broken(f"{key} is not a list of strings")
    found = list(value)
    if not found or not all(isinstance(item, str) for item in found):
        raise broken(f"{key} is empty or holds something other than strings")
    return found


def scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    """Read the score of each of `count` tokens."""
    value = _value(metadata, KEY + "scores")
    try:
        found = [float(item) for item in value]
    except (TypeError, ValueError):
        raise broken(f"{KEY}scores is not a list of numbers") from None
    if len(found) != count:
        raise broken(f"there are {count:,} tokens but {len(found):,} scores")
    if any(item != item for item in found):
        raise broken(f"{KEY}scores holds what is not a number (NaN)")
    return found


def merges(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[list[tuple[str, str]], int]:
    """Read merge pairs, and count those left out because they do not join two tokens into a third.

    The library aborts on such a pair. Left out it changes nothing: its halves are never both there, or what they
    would make is no token.
    """
    own = {token: token for token in tokens}  # pairs of these strings take a third of the memory of new ones
    pairs, idle = [], 0
    for rank, merge in enumerate(strings(metadata, KEY + "merges")):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise broken(f"merge {rank:,} ({merge[:80]!r}) is not a pair")
        if left in own and right in own and left + right in own:
            pairs.append((own[left], own[right]))
        else:
            idle += 1
    return pairs, idle


def _value(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise broken(f"the file has no key {key}")
    return metadata[key]


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Type of each token; a file without the key has normal tokens only."""
    value = metadata.get(KEY + "token_type", [TokenType.NORMAL] * count)
    try:
        types = [int(item) for item in value]
    except (TypeError, ValueError):
        raise broken(f"{KEY}token_type is not a list of integers") from None
    if len(types) != count:
        raise broken(f"there are {count:,} tokens but {len(types):,} token types")
    return types


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """A special token's id, None where the file does not name it."""
    value = metadata.get(KEY + name)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise broken(f"{KEY}{name} is {value!r}, outside the vocabulary of {count:,} tokens")
    return value
