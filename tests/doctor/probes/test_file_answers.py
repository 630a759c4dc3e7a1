from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from strata.cli.preflight import open_model
from strata.doctor.probes import file_answers as module
from strata.doctor.probes.file_answers import file_answers
from strata.errors import Undetermined, UsageError


def test_a_file_a_folder_and_nothing_at_all_answer(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "model.gguf", tmp_path, tmp_path / "gone.gguf", "demo", "hf:owner/repo"):
        assert file_answers(str(path), 30.0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert file_answers(str(tmp_path / "pipe.gguf"), 30.0)


def test_a_disk_that_does_not_answer_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CODE", "import time; time.sleep(60)")  # as touching a lost network share does
    monkeypatch.setattr(module.file_answers, "__defaults__", (0.5,))
    started = time.monotonic()
    with pytest.raises(Undetermined, match=r"does not answer") as caught:
        open_model(str(tmp_path / "model.gguf"), header_only=True)
    assert time.monotonic() - started < 20
    assert "model.gguf" in str(caught.value)


def test_what_answers_is_opened_as_ever(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_model(str(tmp_path / "gone.gguf"))
