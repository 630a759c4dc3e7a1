"""Where Strata keeps what is not the person's own: what can be fetched or made again, and the logs of runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STRATA_CACHE_DIR"


def cache_folder() -> Path:
    """Return the folder for what can be fetched or made again; it may not exist yet."""
    from platformdirs import user_cache_path

    return user_folder(VARIABLE, lambda: user_cache_path("strata", appauthor=False), "cache")


def user_folder(variable: str, usual: Callable[[], Path], purpose: str) -> Path:
    """Return the folder that an environment variable names, else the system's usual one.

    A user without a home, or with one that cannot be written (``docker run --user 12345``, a service), gets one in the
    system's folder for temporary files instead.

    Parameters
    ----------
    variable : str
    usual : callable
        Raises `RuntimeError` where there is neither HOME nor an account, as platformdirs does.
    purpose : str
        A word for the folder's name.
    """
    chosen = os.environ.get(variable)
    if chosen:
        return Path(chosen)
    try:
        folder = usual()
    except RuntimeError:
        return _without_home(purpose)
    return folder if _can_be_written(folder) else _without_home(purpose)


def _can_be_written(folder: Path) -> bool:
    """Return whether `folder`, or the nearest folder above it that exists, takes files of this user."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _without_home(purpose: str) -> Path:
    owner = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"strata-{purpose}-{owner}"
