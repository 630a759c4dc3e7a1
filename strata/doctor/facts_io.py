"""Facts as a file: recorded on one machine, replayed on another."""

from __future__ import annotations

from pathlib import Path

import msgspec

from strata.doctor.facts import SCHEMA_VERSION, Facts
from strata.doctor.files import write_files
from strata.errors import UsageError

LARGEST_NUMBER = 1 << 64
LARGEST = 16 << 20  # bytes of a record; /dev/zero has no end


class _Schema(msgspec.Struct):
    """The part of every schema's document that says which one it is."""

    schema_version: int


def read_facts(path: Path) -> Facts:
    """Return the facts recorded at `path`.

    Raises
    ------
    UsageError
        When the file cannot be read, is not JSON, or has another schema.
    """
    asked = f"read facts from {path}"
    again = "Record them with this version: strata doctor --save-facts FILE"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as failure:
        raise UsageError(asked, failure.strerror or str(failure), "Check the path") from None
    if len(text) > LARGEST:
        raise UsageError(asked, f"it is larger than {LARGEST >> 20} MiB, which no record of facts is", "Check the path")
    try:
        version = msgspec.json.decode(text, type=_Schema).schema_version
        if version != SCHEMA_VERSION:
            raise UsageError(asked, f"it has schema version {version}, this Strata reads {SCHEMA_VERSION}", again)
        facts = msgspec.json.decode(text, type=Facts)
        require_sane(msgspec.to_builtins(facts))
        return facts
    except msgspec.ValidationError as failure:
        raise UsageError(asked, f"it is JSON, but not a record of facts: {failure}", again) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as failure:
        raise UsageError(asked, f"it is not JSON that Strata wrote: {failure}", again) from None


def require_sane(value: object, name: str = "") -> None:
    """Raise `ValueError` for a number that nobody can have counted.

    Sizes are sums of what is counted in 64 bits. Neither they nor speeds nor cores, by their `name`, are less than 0.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            require_sane(item, key if isinstance(key, str) and not key.isdecimal() else name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            require_sane(item, name)
    elif isinstance(value, (int, float)):
        if abs(value) >= LARGEST_NUMBER:
            raise ValueError("it has a number of more than 64 bits")
        if value < 0 and (name.startswith("cpu_") or name.endswith(("_bytes", "_bytes_per_s"))):
            raise ValueError(f"{name} is {value}, less than 0")


def write_facts(facts: Facts, path: Path) -> None:
    """Write `facts` to `path`, whole or not at all.

    Raises
    ------
    StrataError
        When the file cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(facts)) + b"\n"
    write_files({path: data}, f"write facts to {path}", "Choose another file")
