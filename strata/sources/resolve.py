"""What MODEL on the command line stands for."""

from __future__ import annotations

from pathlib import Path

from strata.sources import Progress


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
        There is no such repository or file, or the name does not say which of several.
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
    return Path(model)
