"""How often each expert was asked for, kept from run to run: the next one starts with the likeliest ones in VRAM.

It says nothing of what was asked or answered. Only a GPU with fewer slots than experts makes one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.folders import cache_folder

Uses = NDArray[np.uint32]

FOLDER = "profiles"
_WEIGHT = 32  # uses that the likeliest expert starts with: what this run asks for soon counts for more


def profile_file(header_sha256: str) -> Path:
    """Return where the profile of the model with this header is kept."""
    return cache_folder() / FOLDER / f"{header_sha256[:32]}.npy"


def read_profile(path: Path, shape: tuple[int, int]) -> Uses | None:
    """Return uint32 [layers, experts], scaled to `_WEIGHT` at most; None where there is none of this shape."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # none yet, or cut short
        return None
    if found.shape != shape or found.dtype != np.uint32 or not found.any():
        return None
    scaled: Uses = (found.astype(np.float64) * (_WEIGHT / found.max())).astype(np.uint32)
    return scaled


def write_profile(path: Path, uses: Uses) -> None:
    """Keep a profile, whole or not at all; where it cannot be written, the next run does without."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.save(file, uses)
        Path(file.name).replace(path)


def hottest_first(uses: Uses, keys: Sequence[int]) -> list[int]:
    """Sort keys (``layer * experts + expert``) by use, the most used first, equal ones by number."""
    order = np.asarray(sorted(keys), np.intp)
    return [int(key) for key in order[np.argsort(-uses.reshape(-1)[order].astype(np.int64), kind="stable")]]
