"""Checked access to the metadata keys of a model's architecture."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn, SupportsIndex, cast

from strata.errors import ModelFileError
from strata.gguf.wording import shown

if TYPE_CHECKING:  # the reader loads numpy
    from strata.gguf.reader import GGUFFile


class ArchitectureKeys:
    """Metadata of one architecture, checked.

    Keys are given without the architecture's prefix. Every method raises `ModelFileError`, naming the key, when it is
    missing and has no default, or holds something else than it should.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.architecture = ""
        self.architecture = self.text("general.architecture")

    def fail(self, found: str) -> NoReturn:
        """Refuse the file."""
        raise ModelFileError(
            f"read the facts of model {self._file.path}",
            found,
            "Take a complete model file, made by a current converter",
        )

    def full(self, key: str) -> str:
        """The key as a message names it."""
        return f"metadata key {shown(f'{self.architecture}.{key}')}"

    def text(self, key: str, default: str | None = None) -> str:
        """A string; the one method that takes the whole key."""
        value = self._file.metadata.get(key, default)
        if not isinstance(value, str):
            self.fail(f"metadata key {shown(key)} is " + ("missing" if value is None else "not a string"))
        return value

    def number(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least `least`."""
        return self._checked(key, self._file.metadata.get(f"{self.architecture}.{key}", default), least)

    def per_layer(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """A number for each layer, from one for all or an array."""
        name = f"{self.architecture}.{key}"
        length = self._file.metadata.array_length(name)
        if length is None:
            return (self.number(key, default),) * layers
        if length != layers:
            self.fail(f"{self.full(key)} has {length} values for {layers} layers")
        return tuple(
            self._checked(key, value, least=0) for value in cast("Iterable[object]", self._file.metadata[name])
        )

    def _checked(self, key: str, value: object, least: int) -> int:
        if value is None:
            self.fail(f"{self.full(key)} is missing")
        try:
            number = operator.index(cast("SupportsIndex", value))
        except TypeError:
            self.fail(f"{self.full(key)} is {shown(value)}, not a whole number")
        if number < least:
            self.fail(f"{self.full(key)} is {number}, less than {least}")
        return number
