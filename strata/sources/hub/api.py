"""Talking to the hub: what a repository holds, and ranges of its files.

Requests, tokens, proxies, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub. Its own download is not used: in
version 2.4 it starts over after an interruption, and compares sizes only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata import __version__
from strata.errors import ModelUnavailable
from strata.sources.hub.choose import HubFile
from strata.sources.hub.name import HubName, is_plain
from strata.sources.hub.refusals import Unreachable, explained, transport_errors

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


class Interrupted(Exception):
    """A transfer broke off, or the hub asked for patience: worth another try."""


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: tuple[HubFile, ...]


def list_files(name: HubName) -> Listing:
    """Ask the hub what a repository holds.

    Raises
    ------
    Unreachable
        The hub does not answer, answers with an error of its own, or HF_HUB_OFFLINE is set.
    ModelUnavailable
        It refuses access.
    UsageError
        There is no such repository.
    """
    from huggingface_hub import HfApi, constants

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters of its warnings is in the errors
    api = HfApi(library_name="strata", library_version=__version__)
    with explained(name):
        try:
            info = api.model_info(name.repo, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            commit = info.sha or "main"
            files = [
                HubFile(each.rfilename, int(each.size or 0), _checksum(each.lfs.sha256 if each.lfs else each.blob_id))
                for each in info.siblings or ()
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unreachable(
                f"open model {name}",
                f"{api.endpoint} does not answer as a hub does ({type(error).__name__})",
                "Check the network (a login page?) and HF_ENDPOINT",
            ) from None
    return Listing(commit, tuple(file for file in files if is_plain(file.path)))


def _checksum(text: object) -> str:
    """Return a checksum as it has to look, else nothing: it becomes part of a file's name."""
    return text if isinstance(text, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else ""


def read(name: HubName, commit: str, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
    """Give the bytes from `start` to `stop` of a file, at most, as they arrive.

    Raises
    ------
    Interrupted
        The transfer broke off; what was given is good.
    StrataError
        As for `list_files`; ModelUnavailable also when the file is not as large as the listing says.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="strata", library_version=__version__)
    headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(name.repo, file.path, revision=commit)
    with explained(name):
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    hf_raise_for_status(response)
                position = _position(name, file, start, response.status_code, response.headers)
                for chunk in response.iter_bytes():
                    wanted = chunk[max(0, start - position) : max(0, stop - position)]
                    position += len(chunk)
                    if wanted:
                        yield wanted
                    if position >= stop:
                        return
        except HfHubHTTPError as error:
            if error.response.status_code in _TRANSIENT:
                raise Interrupted(f"the hub answers {error.response.status_code}") from None
            raise
        except transport_errors() as error:
            raise Interrupted(str(error) or type(error).__name__) from None


def _position(name: HubName, file: HubFile, start: int, status: int, headers: Mapping[str, str]) -> int:
    """Check that the answer is about the file that was listed; return where in it the answer begins."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
    if status == 206 and match:
        begins, size = int(match[1]), int(match[2])
    else:  # no ranges here: the whole file comes, and its first part is passed over
        begins, size = 0, int(headers.get("Content-Length", file.nbytes))
    if size != file.nbytes or begins > start:
        raise ModelUnavailable(
            f"fetch {file.path} of {name}",
            f"the hub lists {file.nbytes:,} bytes, but sends a file of {size:,}",
            "Try again later: the repository is perhaps being changed. Nothing of this answer was kept",
        )
    return begins
