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


# Oldest driver branch per CUDA major, (Linux, Windows): NVIDIA's CUDA release notes, "minor version compatibility".
OLDEST_DRIVER = {12: ((525, 60), (528, 33)), 13: ((580,), (580,))}
# Oldest compute capability per CUDA major: CUDA 12 dropped Kepler, CUDA 13 what comes before Turing.
OLDEST_GPU = {12: (5, 0), 13: (7, 5)}


def remedy_for(
    cuda: tuple[int, ...] | None, capability: tuple[int, ...] | None, *options: str, windows: bool = False
) -> str:
    """Return what brings CuPy to a GPU: the package, and before it the driver where that is too old for any.

    Parameters
    ----------
    cuda : tuple of int, optional
        Newest CUDA version that the driver supports.
    capability : tuple of int, optional
        Compute capability of the oldest GPU that is to be used.
    options : str
        Of pip.
    windows : bool
        Whether the driver is Windows', whose branches have other numbers.
    """
    if capability is not None and capability < OLDEST_GPU[12]:
        return "No CuPy that Strata can use supports this GPU (compute capability 5.0 is the least): --device cpu"
    old_gpu = capability is not None and capability < OLDEST_GPU[13]
    if cuda is not None and cuda < (12,):
        branch = OLDEST_DRIVER[12][windows][0]
        want = f"{branch} to 580" if old_gpu else "580 or newer"  # driver 580 is the last one for these GPUs
        command = pip_install("cuda12" if old_gpu else "cuda13", *options)
        return f"Install NVIDIA driver {want} (this one is too old for any CuPy) and restart, then: {command}"
    return pip_install("cuda12" if old_gpu or (cuda is not None and cuda < (13,)) else "cuda13", *options)


CUDA12, CUDA13 = pip_install("cuda12"), pip_install("cuda13")
