"""From ``hf:owner/repo[/file]`` to a file on this machine.

What the cache holds is used without asking the hub: the same name gives the same bytes, with or without a network,
until `strata cache clear`. Only a name without a file asks the hub first, since it may hold several models.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from strata.sources import Progress
from strata.sources.hub.api import Listing, list_files
from strata.sources.hub.choose import HubModel, choose
from strata.sources.hub.download import download, require_space
from strata.sources.hub.headers import download_header
from strata.sources.hub.name import HubName, parse_name, shard_names
from strata.sources.hub.refusals import Unreachable, require_endpoint
from strata.sources.hub.store import HEADERS, MODELS, Store, store


def hub_model(text: str, *, header_only: bool, progress: Progress) -> Path:
    """Return the file, or the first of the set, that ``hf:owner/repo[/file]`` names; fetched if need be.

    Parameters
    ----------
    text : str
    header_only : bool
        The header is enough; if the model is not here, only its first megabytes are fetched.
    progress : Progress
        Told about every step.

    Raises
    ------
    UsageError
        No such repository or file, or several models and no word which.
    ModelUnavailable
        No access, no network, no room, or bytes that are not the hub's.
    ModelFileError
        The header is no GGUF header.
    """
    name = parse_name(text)
    require_endpoint()
    whole, headers = store(MODELS, name.repo), store(HEADERS, name.repo)
    stores = (whole, headers) if header_only else (whole,)
    if name.file is not None:
        found = _kept(name.repo, name.file, stores)
        if found:
            return found
    progress("asking the hub", None, None)
    try:
        listing = list_files(name)
    except Unreachable:
        found = None if name.file else _only_kept(name, stores)
        if found is None:
            raise
        return found
    chosen = choose(name, listing.files)
    found = _kept(name.repo, chosen.path, stores)
    if found:
        return found
    if header_only:
        _fetch_headers(name, listing, chosen, headers, progress)
        return headers.path(chosen.path)
    _fetch(name, listing, chosen, whole, progress)
    with contextlib.suppress(OSError):  # the whole has its header; but another Strata may be planning by this one
        for file in chosen.files:
            headers.remove(headers.path(file.path))
    headers.tidy()
    return whole.path(chosen.path)


def is_header(text: str, path: Path) -> bool:
    """Say whether `path`, which `hub_model` gave for a name, is that of a header alone."""
    return path.is_relative_to(store(HEADERS, parse_name(text).repo).folder)


def _kept(repo: str, file: str, stores: tuple[Store, ...]) -> Path | None:
    """Find a model of which every file is here: in Strata's cache, else in the one that other tools share."""
    names = shard_names(file)
    whole, *others = stores
    if all(whole.keeps(name) for name in names):
        return whole.path(names[0])
    from huggingface_hub import try_to_load_from_cache

    shared = [try_to_load_from_cache(repo, name) for name in names]
    if all(isinstance(path, str) for path in shared):
        return Path(str(shared[0]))
    for each in others:
        if all(each.keeps(name) for name in names):
            return each.path(names[0])
    return None


def _only_kept(name: HubName, stores: tuple[Store, ...]) -> Path | None:
    """Choose among the models of which every file is in Strata's cache; None when there is none."""
    for each in stores:
        kept = {file.path: file for file in each.files()}
        whole = [file for file in kept.values() if all(shard in kept for shard in shard_names(file.path))]
        if whole:
            return each.path(choose(name, whole).path)
    return None


def _fetch(name: HubName, listing: Listing, model: HubModel, whole: Store, progress: Progress) -> None:
    what = "fetching the model"
    with whole.lock(f"another Strata is {what}: waiting", progress):
        missing = [file for file in model.files if not whole.keeps(file.path)]
        require_space(name, whole, missing)
        done = model.nbytes - sum(file.nbytes for file in missing)
        for file in missing:
            download(name, listing.commit, file, whole, partial(_tell, progress, what, done, model.nbytes))
            done += file.nbytes


def _tell(progress: Progress, what: str, before: int, total: int, here: int) -> None:
    progress(what, before + here, total)


def _fetch_headers(name: HubName, listing: Listing, model: HubModel, headers: Store, progress: Progress) -> None:
    what = "fetching the header"
    with headers.lock(f"another Strata is {what}: waiting", progress):
        progress(what, None, None)
        for file in model.files:
            if not headers.keeps(file.path):
                download_header(name, listing.commit, file, headers)
