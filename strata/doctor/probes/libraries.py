"""Finds the driver's libraries: every file the loader could take, in its order, and the one it took.

Two libcuda files are a common cause of "no device": the first on the path wins, and in WSL or a container it
may be a distribution's that has no driver behind it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from strata.doctor.facts import LibraryFile
from strata.doctor.probes.collect import Unknown

Candidates = tuple[LibraryFile, ...]
_DEFAULT_FOLDERS = ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "lib")
_UNSEARCHED_FOLDERS = ("usr/lib/wsl/lib",)  # where the driver's own files are in WSL


def search_cuda() -> Candidates:
    """Return every libcuda (nvcuda.dll) on this machine's search path."""
    return _search("libcuda.so.1", "nvcuda.dll")


def search_nvml() -> Candidates:
    """Return every libnvidia-ml (nvml.dll) on this machine's search path."""
    return _search("libnvidia-ml.so.1", "nvml.dll")


def _search(soname: str, dll: str) -> Candidates:
    if sys.platform == "win32":
        from strata.doctor.probes import windows

        return tuple(candidates_in(windows.dll_folders(os.environ), dll))
    return linux_candidates(soname, Path("/"), os.environ, loader_cache())


def linux_candidates(soname: str, root: Path, environment: Mapping[str, str], cache: str) -> Candidates:
    """Return the files called `soname` in the order of Linux's loader.

    Parameters
    ----------
    soname : str
        ``libcuda.so.1``.
    root : Path
        Where the file system starts.
    environment : mapping
        For ``LD_LIBRARY_PATH``.
    cache : str
        What ``ldconfig -p`` prints.
    """
    folders = [
        ("LD_LIBRARY_PATH", root / f.lstrip("/")) for f in environment.get("LD_LIBRARY_PATH", "").split(":") if f
    ]
    cached = re.findall(rf"^\s*{re.escape(soname)} \(.*\) => (.+)/[^/]+$", cache, re.MULTILINE)
    folders += [("ld.so.cache", root / folder.lstrip("/")) for folder in cached]
    for top in ("", "usr"):
        folders += [("default folder", root / top / folder) for folder in _DEFAULT_FOLDERS]
    folders += [("not searched", root / folder) for folder in _UNSEARCHED_FOLDERS]
    return tuple(candidates_in(folders, soname))


def candidates_in(folders: Iterable[tuple[str, Path]], name: str) -> Iterator[LibraryFile]:
    """Yield the files called `name`; a folder reached a second time, by a link too, is left out."""
    seen = set()
    for found_by, folder in folders:
        file = folder / name
        if not file.is_file() or (real := folder.resolve()) in seen:
            continue
        seen.add(real)
        target = file.resolve()
        version = re.search(r"\.so\.(\d+(?:\.\d+)+)$", target.name)
        yield LibraryFile(
            path=str(file),
            target=None if target == file else str(target),
            version=version[1] if version else None,
            found_by=found_by,
        )


def loader_cache() -> str:
    """Return what ``ldconfig -p`` prints, or nothing where there is no ldconfig (musl, macOS)."""
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', os.defpath)}:/sbin:/usr/sbin")
    if ldconfig is None:
        return ""
    done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, errors="replace", timeout=5, check=False)
    return done.stdout


def loaded_file(name: str) -> str:
    """Return the path of the library that this process has mapped.

    Parameters
    ----------
    name : str
        Start of the file's name: ``libcuda.so``, or ``nvcuda.dll`` on Windows.

    Raises
    ------
    Unknown
        When no such library is mapped.
    """
    if sys.platform == "win32":
        from strata.doctor.probes import windows

        return windows.loaded_dll(name)
    return mapped_file(Path("/proc/self/maps").read_text(), name)


def mapped_file(maps: str, name: str) -> str:
    """Return the first path in the text of a ``/proc/PID/maps`` whose file name starts with `name`."""
    for line in maps.splitlines():
        path = line.partition("/")
        if path[1] and Path(path[2]).name.startswith(name):
            return "/" + path[2]
    raise Unknown(f"{name} is not loaded")


def why_not_loadable(path: str) -> str:
    """Return the loader's own words for a library that it refuses."""
    try:
        ctypes.CDLL(path)
    except OSError as failure:
        return str(failure)
    return "by its path it loads, so it is not where the loader looks"
