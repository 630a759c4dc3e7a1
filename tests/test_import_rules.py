"""The import table of docs/architecture.md is kept by a tool, and the tool really catches each rule's breach."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the import linter on the copy of strata in `folder`."""
    script = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_rules_hold() -> None:
    result = lint(REPO)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("errors", "import strata.gguf", "errors imports nothing"),
        ("gguf/__init__", "import strata.kernels", "gguf imports"),
        ("kernels/ops", "import strata.gguf", "kernels imports"),
        ("sources/__init__", "import strata.runtime", "sources imports"),
        ("doctor/facts", "import strata.runtime", "doctor imports"),
        ("runtime/__init__", "import strata.doctor.probes", "runtime imports"),
        ("runtime/__init__", "import strata.cli", "runtime imports"),
        ("doctor/facts", "import cupy", "CuPy"),
    ],
)
def test_breach_is_caught(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(REPO / "strata", tmp_path / "strata", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    broken = tmp_path / "strata" / f"{module}.py"
    broken.write_text(broken.read_text() + f"\n{line}\n")
    result = lint(tmp_path)
    assert result.returncode != 0
    verdicts = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in verdicts), result.stdout
