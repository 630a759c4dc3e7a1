"""Lays out a machine's /proc and /sys as files, so that a probe can be shown any machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lay(root: Path, files: Mapping[str, str]) -> Path:
    """Write `files` (path below the root -> text; a path that ends in / is a folder) and return `root`."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
