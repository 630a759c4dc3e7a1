"""What Tab offers, and that the shells' scripts ask for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli import completion
from strata.cli.completion import complete_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "a.gguf",
        "models/b 1.gguf",
        "models/c.GGUF",
        "models/notes.txt",
        ".hidden/d.gguf",
        "deep/1/2/3/e.gguf",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for number in (1, 2):
        (tmp_path / f"set-{number:05}-of-00002.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_folders_and_the_demo(folder: Path) -> None:
    separator = os.sep
    below = [f"models{separator}b 1.gguf", f"models{separator}c.GGUF"]
    assert complete_model("") == ["demo", "a.gguf", *below, "set-00001-of-00002.gguf"]
    assert complete_model("mo") == below
    assert complete_model("d") == ["demo"]  # what is deeper is offered when one has typed that far
    assert complete_model("deep/1/") == ["deep/1/2/3/e.gguf".replace("/", separator)]
    assert complete_model("./a") == ["./a.gguf"]
    assert complete_model(".h") == [f".hidden{separator}d.gguf"]
    assert complete_model(f"{folder}/a") == [f"{folder}/a.gguf"]
    assert complete_model("no/such/") == []


def test_a_large_tree_is_not_searched_for_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_MOST_LOOKED_AT", 2)
    assert complete_model("") == ["demo", "a.gguf"]
    monkeypatch.setattr(completion, "_MOST_LOOKED_AT", 5_000)
    monkeypatch.setattr(completion, "_MOST", 2)
    assert complete_model("") == ["demo", "a.gguf"]


def test_the_home_folder_is_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert complete_model("~/a") == [f"{folder}{'/' if os.sep == '/' else os.sep}a.gguf".replace("\\", os.sep)]


@pytest.mark.parametrize("typed", ["strata run ", "strata plan ", "strata doctor ", "strata report "])
def test_bash_is_offered_them(folder: Path, typed: str) -> None:
    asked = {"_STRATA_COMPLETE": "complete_bash", "COMP_WORDS": typed + "a", "COMP_CWORD": "2"}
    result = subprocess.run(
        [sys.executable, "-m", "strata"],
        env=os.environ | asked | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["a.gguf"], result.stderr


def test_bash_gets_blanks_escaped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_STRATA_COMPLETE", "complete_bash")
    assert complete_model("models/b") == [f"models{os.sep}b\\ 1.gguf"]


def test_the_script_to_install_names_the_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "strata", "--show-completion", "bash"],
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_STRATA_COMPLETE=complete_bash" in result.stdout, result.stderr
