"""The checks that every change passes: types, style, format; and one test command, told alike everywhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "tool",
    [["mypy", "strata"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]],
    ids=lambda tool: " ".join(tool),
)
def test_tool_is_content(tool: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *tool], cwd=REPO, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_one_test_command_everywhere() -> None:
    readme = (REPO / "README.md").read_text()
    match = re.search(r"^(python3 -m venv .*pytest.*)$", readme, re.MULTILINE)
    assert match, "README.md has no one-line test command"
    assert match[1] in (REPO / ".ci" / "run").read_text()
    assert "bash .ci/run" in (REPO / ".github" / "workflows" / "ci.yml").read_text()
