"""The header of a model alone, by range requests: enough to plan before anything large is fetched."""

from __future__ import annotations

import time

from strata.errors import ModelFileError, ModelUnavailable
from strata.gguf.header import MAGIC, read_header
from strata.sources.hub.api import Interrupted, read
from strata.sources.hub.choose import HubFile
from strata.sources.hub.name import HubName
from strata.sources.hub.store import Store

_STEPS = (1 << 20, 4 << 20, 16 << 20, 64 << 20)  # the last is as long as `strata.gguf` allows a header to be
_PAUSES_S = (1, 2, 4)


def download_header(name: HubName, commit: str, file: HubFile, store: Store) -> None:
    """Fetch the first megabytes of a file into `store`, as many as its header takes.

    Raises
    ------
    ModelFileError
        What comes is no GGUF header.
    ModelUnavailable
        The hub breaks off again and again, or a file that Strata did not fetch lies at its place.
    """
    asked = f"read the header of {HubName(name.repo, file.path)}"
    store.require_free(file)
    start = bytearray()
    for step in _STEPS:
        _extend(name, commit, file, start, min(step, file.nbytes))
        try:
            read_header(bytes(start), asked, shard=0)
            break
        except ModelFileError:
            if len(start) >= min(_STEPS[-1], file.nbytes) or start[: len(MAGIC)] != MAGIC:
                raise
    part = store.part(file)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(start)
    store.put(HubFile(file.path, len(start), file.checksum), part)


def _extend(name: HubName, commit: str, file: HubFile, start: bytearray, stop: int) -> None:
    """Fetch on until `start` has `stop` bytes."""
    failures = 0
    while len(start) < stop:
        before = len(start)
        why = "the answer is empty"
        try:
            for chunk in read(name, commit, file, before, stop):
                start += chunk
        except Interrupted as error:
            why = str(error)
        failures = 0 if len(start) > before else failures + 1
        if failures > len(_PAUSES_S):
            raise ModelUnavailable(
                f"read the header of {HubName(name.repo, file.path)}", why, "Check the network and try again"
            )
        if failures:
            time.sleep(_PAUSES_S[failures - 1])
