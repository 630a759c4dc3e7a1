"""What the system's own tools say, word for word, for a report; a tool that hangs is left alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TIME_LIMIT_S = 5.0
LONGEST = 256 << 10  # bytes read of one tool's output
COMMANDS: dict[str, Sequence[str]] = {
    "nvidia-smi": ("nvidia-smi",),
    "nvidia-smi -q": ("nvidia-smi", "-q"),
    "nvidia-smi topo -m": ("nvidia-smi", "topo", "-m"),
    "pip list": (sys.executable, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"),
    # Not systeminfo: it names the owner, the domain and the product's id, each after a word of the system's language.
    # Not uname -a: it names the host.
    **({"ver": ("cmd", "/c", "ver")} if sys.platform == "win32" else {}),
    **({"uname": ("uname", "-srvm"), "lscpu": ("lscpu",)} if sys.platform != "win32" else {}),
}


def raw_outputs(commands: Mapping[str, Sequence[str]] = COMMANDS, time_limit_s: float = TIME_LIMIT_S) -> dict[str, str]:
    """Run `commands` side by side and return what each printed; of one that is absent or hangs, that it is so.

    A tool that cannot be killed (a driver in uninterruptible wait) is not waited for.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="strata-raw-", ignore_cleanup_errors=True)
    except OSError as failure:
        return dict.fromkeys(commands, f"was not run: {failure.strerror or failure}")
    with folder:
        return _run(commands, Path(folder.name), time_limit_s)


def _run(commands: Mapping[str, Sequence[str]], folder: Path, time_limit_s: float) -> dict[str, str]:
    outputs: dict[str, str] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    files = {name: folder / str(number) for number, name in enumerate(commands)}
    for name, command in commands.items():
        try:
            with files[name].open("wb") as file:
                running[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )
        except OSError as failure:
            outputs[name] = f"could not be run: {failure.strerror or failure}"
    deadline = time.monotonic() + time_limit_s
    while time.monotonic() < deadline and any(process.poll() is None for process in running.values()):
        time.sleep(0.02)
    for name, process in running.items():
        with files[name].open("rb") as file:
            text = file.read(LONGEST).decode("utf-8", "replace")
        if process.poll() is None:
            process.kill()
            text += f"\n[no end within {time_limit_s:g} s]"
        outputs[name] = text.strip()
    return {name: outputs[name] for name in commands}
