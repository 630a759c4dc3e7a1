"""Memory that the system refuses, wherever: the run answers, or ends in one clear error. Never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from strata.cli.output import memory_refused
from tests.cli.runner import MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")

MIB = 1 << 20
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from strata.cli import main
main()
"""
# What ends the process by itself, before Python can say anything: importing numpy with too little for OpenBLAS.
NOT_OURS = "OpenBLAS error: Memory allocation still failed"


def run_within(limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("mib", [60, 150, 300, 400, 600])
def test_a_run_within_little_address_space_answers_or_says_why_not(mib: int) -> None:
    arguments = ["run", MODEL, "-p", "Hello", "--no-chat", "--max-tokens", "2", "--temp", "0"]
    result = run_within(mib * MIB, *arguments)
    assert "Traceback" not in result.stderr
    assert "bug of its own" not in result.stderr
    if result.returncode == 0:
        assert result.stdout
        return
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "error:" in result.stderr or NOT_OURS in result.stderr, result.stderr
    assert "permission" not in result.stderr


def test_enough_address_space_is_enough() -> None:
    assert run_within(4096 * MIB, "run", MODEL, "-p", "Hi", "--no-chat", "--max-tokens", "1").returncode == 0


@pytest.mark.parametrize("command", [["doctor", MODEL], ["plan", MODEL], ["explain", "out of memory"], ["--help"]])
@pytest.mark.parametrize("mib", [60, 240])
def test_every_command_says_why_it_cannot_go_on(command: list[str], mib: int) -> None:
    result = run_within(mib * MIB, *command)
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1, 3), result.stderr
    assert result.stdout or "error" in result.stderr


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("can't start new thread"), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (ImportError("No module named x"), False),
        (RuntimeError("other"), False),
    ],
)
def test_what_a_refusal_of_memory_looks_like(error: BaseException, refused: bool) -> None:
    assert memory_refused(error) is refused
