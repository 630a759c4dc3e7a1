"""The key-value part of a GGUF header: scalars and strings at once, arrays when they are asked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata.errors import ModelFileError
from strata.gguf.cursor import MAX_NAME_BYTES, Cursor
from strata.gguf.strings import decode_strings
from strata.gguf.wording import DAMAGED, shown

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | NDArray[np.generic] | list[str]

MAX_KEYS = 1 << 16  # real files have some dozens


class ValueType(IntEnum):
    """Type of a metadata value by its number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_NUMBERS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True)
class _Array:
    """An array as stored, not decoded."""

    type: ValueType
    length: int
    raw: memoryview


class Metadata(Mapping[str, Value]):
    """Keys and values of a header in file order.

    A numeric array comes as a read-only NumPy array of the stored dtype, an array of strings as ``list[str]``; each is
    decoded at the first access and kept.
    """

    def __init__(self, values: dict[str, Scalar | _Array], asked: str) -> None:
        self._values = values
        self._asked = asked
        self._decoded: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        value = self._values[key]
        if not isinstance(value, _Array):
            return value
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, value)
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def array_length(self, key: str) -> int | None:
        """Elements of an array without decoding it; None when the key is absent or not an array."""
        value = self._values.get(key)
        return value.length if isinstance(value, _Array) else None

    def _decode(self, key: str, array: _Array) -> Value:
        raw = bytes(array.raw)  # a copy, so that a decoded array does not keep the file mapped
        if array.type is not ValueType.STRING:
            return np.frombuffer(raw, dtype=np.dtype(_NUMBERS[array.type].format))
        try:
            return decode_strings(raw, array.length)
        except ValueError as error:
            raise ModelFileError(self._asked, f"metadata key {shown(key)}: {error}", DAMAGED) from None


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` key-value pairs.

    Raises
    ------
    ModelFileError
        For a pair that is truncated, oversized, of an unknown type, or whose key was there before.
    """
    if count > MAX_KEYS:
        cursor.fail(f"the header claims {count} metadata keys, more than {MAX_KEYS}")
    values: dict[str, Scalar | _Array] = {}
    for index in range(count):
        key = cursor.string(f"the name of metadata key {index}", MAX_NAME_BYTES)
        if key in values:
            cursor.fail(f"metadata key {shown(key)} is there twice")
        values[key] = _read_value(cursor, f"metadata key {shown(key)}")
    return Metadata(values, cursor.asked)


def _read_type(cursor: Cursor, what: str) -> ValueType:
    number = cursor.u32(what)
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"{what} has the unknown value type {number}")


def _read_value(cursor: Cursor, what: str) -> Scalar | _Array:
    value_type = _read_type(cursor, what)
    if value_type is ValueType.STRING:
        return cursor.string(what)
    if value_type is ValueType.ARRAY:
        return _skip_array(cursor, what)
    number = _NUMBERS[value_type]
    (value,) = number.unpack(cursor.take(number.size, what))
    return value  # type: ignore[no-any-return]


def _skip_array(cursor: Cursor, what: str) -> _Array:
    element = _read_type(cursor, what)
    length = cursor.u64(what)
    start = cursor.position
    if element is ValueType.ARRAY:
        cursor.fail(f"{what} is an array of arrays, which no model file uses")
    if element is ValueType.STRING:
        cursor.skip_strings(length, what)
    else:
        cursor.take(length * _NUMBERS[element].size, what)
    return _Array(element, length, cursor.buffer[start : cursor.position])
