"""What every test relies on: its own cache and log folders, so that a person's are never touched."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep logs, and what is fetched or made, inside the test's folder."""
    monkeypatch.setenv("STRATA_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
