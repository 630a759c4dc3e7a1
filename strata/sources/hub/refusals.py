"""What a hub's refusals mean for a person: every error of huggingface_hub becomes one of Strata's, with a remedy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from strata.errors import ModelUnavailable, StrataError, UsageError
from strata.sources.hub.name import HubName


class Unreachable(ModelUnavailable):
    """The hub does not answer, or is not to be asked; the cache may help."""


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


def transport_errors() -> type[Exception]:
    """Return the base class of all errors of the HTTP client that huggingface_hub uses, whichever that is."""
    import huggingface_hub.errors

    base = vars(huggingface_hub.errors)["HTTPError"]
    assert isinstance(base, type)
    assert issubclass(base, Exception)
    return base


@contextlib.contextmanager
def explained(name: HubName) -> Iterator[None]:
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
    except transport_errors() as error:
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
