"""Runs the command line as a person would: in a process of its own, stdout and stderr apart."""

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
MODEL = str(GOLDEN / "qwen3moe.gguf")


def strata(*arguments: str, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `strata` with `arguments`; no terminal on either side."""
    return subprocess.run(
        [sys.executable, "-m", "strata", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def assert_clear(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Assert an error that a person can act on: the exit code, the words, and no traceback."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    said = " ".join(result.stderr.split())
    for word in words:
        assert word in said, result.stderr
