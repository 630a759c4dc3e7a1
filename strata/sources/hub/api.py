"""Talking to the hub: what a repository holds, and ranges of its files. Every refusal becomes an error with a remedy.

Requests, tokens, proxies, HF_ENDPOINT and HF_HUB_OFFLINE are those of huggingface_hub. Its own download is not used: it
starts over after an interruption, and compares sizes only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from strata import __version__
from strata.errors import ModelUnavailable, StrataError, UsageError
from strata.sources.hub.choose import HubFile
from strata.sources.hub.name import HubName, is_plain

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


class Unreachable(ModelUnavailable):
    """The hub does not answer, or is not to be asked; the cache may help."""


class Interrupted(Exception):
    """A transfer broke off, or the hub asked for patience: worth another try."""


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: tuple[HubFile, ...]


def require_endpoint() -> None:
    """Refuse an HF_ENDPOINT that is no address: huggingface_hub reads it when it is imported, and fails there.

    Raises
    ------
    UsageError
        It is none.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        sound = False
    if address and not sound:
        raise UsageError(
            "use the hub that HF_ENDPOINT names",
            f"{address!r} is no address",
            "Write it like https://huggingface.co, or unset HF_ENDPOINT",
        )


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
    with _explained(name):
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
    with _explained(name):
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
        except _transport_errors() as error:
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


def _transport_errors() -> type[Exception]:
    """Return the base class of all errors of the HTTP client that huggingface_hub uses, whichever that is."""
    import huggingface_hub.errors

    base = vars(huggingface_hub.errors)["HTTPError"]
    assert isinstance(base, type)
    assert issubclass(base, Exception)
    return base


@contextlib.contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn the errors of huggingface_hub into Strata's."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise Unreachable(
            f"open model {name}",
            "HF_HUB_OFFLINE is set, and the cache does not hold it",
            "Fetch it once where there is a network, without HF_HUB_OFFLINE",
        ) from None
    except HfHubHTTPError as error:
        raise _refusal(name, error.response.status_code, type(error).__name__) from None
    except _transport_errors() as error:
        raise Unreachable(
            f"open model {name}",
            f"the hub cannot be reached ({str(error) or type(error).__name__}), and the cache does not hold it",
            "Check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT",
        ) from None


def _refusal(name: HubName, status: int, kind: str) -> StrataError:
    """Say what an HTTP status of the hub means for a person."""
    from huggingface_hub import constants, get_token

    asked = f"open model {name}"
    page = f"{constants.ENDPOINT}/{name.repo}"
    token = get_token()
    login = "make a token at https://huggingface.co/settings/tokens and run `hf auth login` (or set HF_TOKEN)"
    if kind == "GatedRepoError" or (status == 403 and not kind.startswith("Disabled")):
        if token:
            return ModelUnavailable(
                asked,
                "the repository is gated, and the account of your token has no access to it",
                f"Open {page}, accept the terms with the account of the token, wait until access is granted, "
                "and give the token the right to read gated repositories",
            )
        return ModelUnavailable(
            asked,
            "the repository is gated: its authors give access to accounts that accept their terms, and no token is set",
            f"Open {page}, log in and accept the terms; then {login}",
        )
    if kind == "RepositoryNotFoundError" or status == 404:
        private = "" if token else f". If it is private, {login}"
        return UsageError(asked, f"{constants.ENDPOINT} has no such repository", f"Check the name at {page}{private}")
    if status == 401:
        return ModelUnavailable(asked, "the hub does not accept the token (401)", f"Take it away, or {login}")
    if kind == "DisabledRepoError":
        return ModelUnavailable(asked, "the hub has disabled this repository", "Choose another repository")
    return Unreachable(asked, f"the hub answers with HTTP status {status}", "Try again later")
