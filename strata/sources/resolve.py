"""What MODEL on the command line stands for."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from strata.errors import UsageError
from strata.sources import Progress

_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:resolve|blob|raw)/[^/?#]+/(?P<file>[^?#]+))?.*"
)
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def resolve(model: str, *, progress: Progress, header_only: bool = False) -> Path:
    """Find the file behind MODEL, fetching it if need be.

    Parameters
    ----------
    model : str
        A path, ``demo``, or ``hf:owner/repo[/file]``.
    progress : Progress
        Told about every step that takes a while.
    header_only : bool
        The model's header is enough: of a model of a hub that is not here, only the first megabytes are fetched.

    Returns
    -------
    Path
        Of the model. A path that was given comes back as it is; whether a sound model lies there is for
        `strata.gguf.reader.open_gguf` to say.

    Raises
    ------
    UsageError
        There is no such repository or file, the name does not say which of several, or it is written otherwise.
    DemoUnavailable
        The demo model is neither in the cache nor can it be fetched.
    ModelUnavailable
        The same, for a model of a hub.
    """
    if model == "demo":
        from strata.sources.demo import demo_model

        return demo_model(progress)
    if model.startswith("hf:"):
        from strata.sources.hub.model import hub_model

        return hub_model(model, header_only=header_only, progress=progress)
    meant = _meant(model)
    if meant is None and model.startswith(("http://", "https://")):
        raise UsageError(
            f"open model {model}", "this is an address, and models are read from files", "Download it and give its path"
        )
    if meant and not os.path.exists(model):  # noqa: PTH110  unlike Path's it takes any text
        raise UsageError(f"open model {model}", "there is no such file", f"Did you mean {meant}?")
    return Path(model)


def _meant(model: str) -> str | None:
    """Guess what a text that is no path of a .gguf file was to be: the page of a model, a repository, the demo."""
    if page := _PAGE.fullmatch(model):
        return f"hf:{page['repo']}" + (f"/{page['file']}" if page["file"] else "")
    if difflib.SequenceMatcher(None, model.lower(), "demo").ratio() >= 0.75:
        return "demo"
    if _REPOSITORY.fullmatch(model) and not model.lower().endswith(".gguf"):
        return f"hf:{model}" if not os.path.isdir(model.split("/")[0]) else None  # noqa: PTH112
    return None
