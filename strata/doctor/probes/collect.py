"""Collects the fields of one group: each is a value, or unknown for a stated reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from subprocess import SubprocessError
from typing import Any

from strata.doctor.cuda_codes import cuda_error


class Unknown(Exception):
    """Raised by a reading function whose value cannot be known here; the text is the reason."""


class Collector:
    """The fields found so far. ``struct(**collector.fields())`` makes the facts."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def take(self, name: str, read: Callable[[], Any], source: str | None = None) -> None:
        """Set field `name` to what `read` returns, or note why it is unknown."""
        self.take_all((name,), lambda: (read(),), source)

    def take_all(self, names: Sequence[str], read: Callable[[], Sequence[Any]], source: str | None = None) -> None:
        """Set several fields that one call reads; they are known or unknown together."""
        try:
            found = dict(zip(names, read(), strict=True))
        except Unknown as reason:
            self.unknown.update(dict.fromkeys(names, str(reason)))
        except (OSError, ValueError, LookupError, RuntimeError, AttributeError, SubprocessError) as failure:
            # RuntimeError is what CuPy's errors are; old libraries lack functions; a tool of the system may hang. One
            # fact that cannot be read must not hide the others.
            error = cuda_error(failure)
            code = "" if error.code is None else f" {error.code}"
            self.unknown.update(dict.fromkeys(names, f"{error.name}{code}: {error.message}"))
        else:
            self.values.update(found)
            if source is not None:
                self.sources.update(dict.fromkeys(names, source))

    def fields(self) -> dict[str, Any]:
        """Return the arguments for a facts struct that has `unknown` and `sources`."""
        return {**self.values, "unknown": dict(self.unknown), "sources": dict(self.sources)}
