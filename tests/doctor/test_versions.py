from __future__ import annotations

import platform
from importlib import metadata

import msgspec
import numpy
import pytest

from strata import __version__
from strata.doctor.versions import installed, versions


def test_versions_of_what_is_installed() -> None:
    found = versions()
    assert list(found)[:3] == ["strata", "python", "system"]
    assert found["strata"] == __version__
    assert found["python"] == platform.python_version()
    assert (found["numpy"], found["msgspec"]) == (numpy.__version__, msgspec.__version__)
    assert "pytest" not in found  # what tests need says nothing of a run


def test_run_from_a_folder_it_still_names_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nobody)
    assert versions()["numpy"] == numpy.__version__


def test_what_is_not_installed_has_none() -> None:
    assert installed("no-such-distribution") is None
