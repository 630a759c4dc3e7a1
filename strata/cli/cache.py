"""`strata cache`: what is kept, how large, where; and deleting it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, err, out, say, stop
from strata.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from strata.sources.kept import Kept


def list_cache(*, json: bool) -> None:
    """Print what Strata keeps in its cache."""
    from strata.folders import VARIABLE, cache_folder
    from strata.sources.kept import kept

    things = kept()
    if json:
        emit_json(
            {"folder": str(cache_folder()), "nbytes": _total(things), "kept": [_document(each) for each in things]}
        )
        return
    if not things:
        out().print(f"Nothing is kept in {cache_folder()}", markup=False, soft_wrap=True)
        return
    out().print(f"{cache_folder()} ({VARIABLE} names another)\n", markup=False, soft_wrap=True)
    for line in _lines(things):
        out().print(line, markup=False, soft_wrap=True)
    out().print(f"\n{_size(_total(things)):>10}  in all; `strata cache clear [NAME]` deletes it", markup=False)


def clear_cache(names: Sequence[str], *, yes: bool, json: bool) -> None:
    """Delete what Strata keeps, or of it what `names` cover; asks first.

    Raises
    ------
    UsageError
        A name covers nothing, or nobody is there to be asked.
    """
    from strata.sources.kept import delete, kept, named

    things = kept()
    chosen = [each for each in things if not names or any(each in named(things, name) for name in names)]
    for name in names:
        if not named(things, name):
            raise UsageError(f"clear {name}", "nothing of this name is kept", "See `strata cache list`")
    if chosen and not yes and not _agreed(chosen, json=json):
        say("Nothing was deleted.")
        return
    refused: list[str] = []
    deleted: list[Kept] = []
    for each in chosen:
        try:
            delete(each)
            deleted.append(each)
        except OSError as error:
            refused.append(f"{each.name}: {error.strerror or error} ({error.filename or each.paths[0]})")
    if json:
        emit_json({"deleted": [_document(each) for each in deleted], "nbytes": _total(deleted), "refused": refused})
    elif chosen:
        say(f"Deleted {len(deleted)} of {len(chosen)}, {_size(_total(deleted))}.")
    else:
        say("Nothing is there to delete.")
    for reason in refused:
        say(f"Not deleted: {reason}")
    stop(ExitCode.FAILED if refused else ExitCode.OK)


def _agreed(things: Sequence[Kept], *, json: bool) -> bool:
    """Ask the person at the terminal."""
    if json or not sys.stdin.isatty():
        why = "--json asks nobody" if json else "there is no terminal to ask on"
        raise UsageError(f"delete {_size(_total(things))} from the cache", why, "Add --yes if that is meant")
    for line in _lines(things):
        say(line)
    err().print(f"Delete these, {_size(_total(things))}? [y/N] ", end="", markup=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(things: Sequence[Kept]) -> list[str]:
    return [f"{_size(each.nbytes):>10}  {each.kind:<10}  {each.name}" for each in things]


def _document(thing: Kept) -> dict[str, object]:
    paths = [str(path) for path in thing.paths]
    return {"name": thing.name, "kind": thing.kind, "nbytes": thing.nbytes, "paths": paths}


def _total(things: Sequence[Kept]) -> int:
    return sum(each.nbytes for each in things)


def _size(nbytes: int) -> str:
    from strata.doctor.units import size

    return size(nbytes)
