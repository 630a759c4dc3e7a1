"""The folder in which Strata keeps what it fetched or made and can fetch or make again."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "STRATA_CACHE_DIR"


def cache_folder() -> Path:
    """Return the folder that `STRATA_CACHE_DIR` names, else the system's place for caches; it may not exist yet."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("strata", appauthor=False)
    except RuntimeError:  # neither HOME nor an account, as under `docker run --user 12345`
        return Path(os.sep, "tmp", f"strata-cache-{os.getuid()}")
