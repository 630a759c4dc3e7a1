"""The packages that reach the GPU, as a command for pip.

They are named one by one, and not as an extra of Strata: where Strata came from a folder, ``pip install --upgrade
strata[...]`` would ask the package index for a project of that name, whoever's it is.
"""

from __future__ import annotations

PACKAGES = {  # as the extras of pyproject.toml have them
    "cuda12": (
        "cuda-bindings>=12.8,<13",
        "cupy-cuda12x>=14",
        "nvidia-cuda-nvrtc-cu12>=12.8",
        "nvidia-cuda-runtime-cu12>=12.8",
    ),
    "cuda13": ("cuda-bindings>=13", "cupy-cuda13x>=14", "nvidia-cuda-nvrtc>=13", "nvidia-cuda-runtime>=13"),
}


def pip_install(extra: str, *options: str) -> str:
    """Return the command that installs what reaches the GPU.

    Parameters
    ----------
    extra : str
        ``cuda12`` or ``cuda13``.
    options : str
        Of pip, such as ``--force-reinstall``.
    """
    quoted = [f'"{package}"' for package in PACKAGES[extra]]  # double quotes: Windows' shell knows no others
    return " ".join(("pip install", *options, *quoted))


CUDA12, CUDA13 = pip_install("cuda12"), pip_install("cuda13")
