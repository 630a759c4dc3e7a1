"""What the Tab key offers for MODEL. It is asked at every press, so nothing heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_BASH_SPECIAL = re.compile(r"[^\w@%+=:,./~-]")
_DEEPEST = 3
_MOST = 200
_MOST_LOOKED_AT = 5_000  # entries of folders: whoever presses Tab waits


def complete_model(incomplete: str) -> list[str]:
    """Offer ``demo`` and the .gguf files that begin like `incomplete`, those of folders that do included.

    Folders are not offered by themselves: a shell would put a blank behind. The files in them share their name, so
    the shell completes up to where they differ. Of a split set the first file is offered.
    """
    in_bash = os.environ.get("_STRATA_COMPLETE") == "complete_bash"  # which puts in what it gets as it is
    offered = ["demo"] if "demo".startswith(incomplete) else []
    for path in _files(os.path.expanduser(incomplete)):  # noqa: PTH111  "" must stay ""
        offered.append(_BASH_SPECIAL.sub(r"\\\g<0>", path) if in_bash else path)
        if len(offered) == _MOST:
            break
    return offered


def _files(start: str) -> Iterator[str]:
    folder, beginning = os.path.split(start)
    yield from _below(Path(folder) if folder else Path(), folder, beginning, 1, iter(range(_MOST_LOOKED_AT)))


def _below(place: Path, shown: str, beginning: str, depth: int, budget: Iterator[int]) -> Iterator[str]:
    try:
        entries = sorted(place.iterdir())
    except OSError:  # a folder that is not there, or cannot be read, has nothing to offer
        return
    for entry in entries:
        if next(budget, None) is None:
            return
        if not entry.name.startswith(beginning) or (entry.name.startswith(".") and not beginning.startswith(".")):
            continue
        name = os.path.join(shown, entry.name)  # noqa: PTH118  keeps "./" as it was typed
        if entry.suffix.lower() == ".gguf" and not _LATER_SHARD.search(entry.name):
            yield name
        elif depth < _DEEPEST and entry.is_dir():
            yield from _below(entry, name, "", depth + 1, budget)
