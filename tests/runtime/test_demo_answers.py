"""The demo model through the whole engine: it computes what the dense original does, and knows its capital."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata.gguf.reader import GGUFFile, open_gguf
from strata.runtime.engine import Engine
from strata.runtime.tokenizer import Tokenizer
from strata.sources.demo import dense_demo_model
from tests.demo import open_demo
from tests.runtime.plans import planned

pytestmark = pytest.mark.demo
PROMPT = "Paris is the capital of France, and a good engine says what it will allocate before it starts."


@pytest.fixture(scope="module")
def demo() -> Iterator[GGUFFile]:
    with open_demo() as file:
        yield file


def all_logits(file: GGUFFile, tokens: list[int]) -> np.ndarray:
    """Logits after every token, one step at a time."""
    with Engine.load(file, planned(file, max_context=64)) as engine:
        return np.stack([engine.decode(token).copy() for token in tokens])


def test_the_experts_compute_what_the_dense_model_does(demo: GGUFFile, tmp_path: Path) -> None:
    dense_demo_model(tmp_path / "dense.gguf", lambda what, done, total: None)
    tokens = Tokenizer.from_metadata(demo.metadata).encode(PROMPT, parse_special=False, begin=True)
    with open_gguf(tmp_path / "dense.gguf") as dense:
        expected = all_logits(dense, tokens)
    found = all_logits(demo, tokens)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 1e-4
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_the_first_command_of_the_readme_answers(demo: GGUFFile) -> None:
    environment = os.environ | {"STRATA_CACHE_DIR": str(demo.path.parent)}
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = re.search(r'strata (run demo -p "[^"]*"[^\n]*)', readme)
    assert command
    result = subprocess.run(
        f"{sys.executable} -m strata {command[1]}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "fits" in result.stderr
