"""What MODEL on the command line stands for."""

from __future__ import annotations

from pathlib import Path

from strata.errors import UsageError
from strata.sources import Progress


def resolve(model: str, *, progress: Progress) -> Path:
    """Find the file behind MODEL, fetching it if need be.

    Parameters
    ----------
    model : str
        A path, or ``demo``.
    progress : Progress
        Told about every step that takes a while.

    Returns
    -------
    Path
        Of the model. A path that was given comes back as it is; whether a sound model lies there is for
        `strata.gguf.reader.open_gguf` to say.

    Raises
    ------
    UsageError
        For ``hf:...``, which is not implemented.
    DemoUnavailable
        The demo model is neither in the cache nor can it be fetched.
    """
    if model == "demo":
        from strata.sources.demo import demo_model

        return demo_model(progress)
    if model.startswith("hf:"):
        raise UsageError(
            f"open model {model}",
            "fetching from a hub is not implemented yet",
            "Download the .gguf file yourself and give its path",
        )
    if model.startswith(("http://", "https://")):
        raise UsageError(
            f"open model {model}", "this is an address, and models are read from files", "Download it and give its path"
        )
    return Path(model)
