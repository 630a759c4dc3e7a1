"""The versions that a log begins with, a report holds and an issue has to name; no library is imported to ask."""

from __future__ import annotations

import platform
from importlib import metadata

import strata

_ASKED_FOR = "numpy", "gguf", "tokenizers", "huggingface_hub", "typer", "rich"  # where Strata itself is not installed
_CUDA = "cupy-cuda13x", "cupy-cuda12x", "cupy", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"


def versions() -> dict[str, str]:
    """Return the versions of Strata, Python and the system, and of each library Strata asks for that is installed."""
    found = {"strata": strata.__version__, "python": platform.python_version(), "system": platform.platform()}
    for name in (*_asked_for(), *_CUDA):
        version = installed(name)
        if version is not None:
            found[name] = version
    return found


def installed(name: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _asked_for() -> list[str]:
    try:
        asked = metadata.requires("strata") or []
    except metadata.PackageNotFoundError:
        asked = list(_ASKED_FOR)
    return [_name(line) for line in asked if "extra ==" not in line]


def _name(requirement: str) -> str:
    """Return the name of a requirement such as ``gguf>=0.17``."""
    return requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip()
