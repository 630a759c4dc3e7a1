"""Where what can be fetched or made again is kept."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from strata.folders import VARIABLE, cache_folder, user_folder


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert "strata" in cache_folder().parts


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no users without a home")
def test_a_user_without_home_or_account_still_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_folder() == Path(tempfile.gettempdir()) / f"strata-cache-{os.getuid()}"


@pytest.mark.parametrize("home", ["file", "read-only"])
def test_a_home_that_cannot_be_written_is_as_good_as_none(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    usual = tmp_path / "home" / ".cache" / "strata"
    if home == "file":
        (tmp_path / "home").write_text("no folder")
    else:
        (tmp_path / "home").mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "home")
    assert user_folder(VARIABLE, lambda: usual, "cache").parent == Path(tempfile.gettempdir())
    monkeypatch.setenv(VARIABLE, str(usual))  # a folder that was chosen is not exchanged for another
    assert user_folder(VARIABLE, lambda: usual, "cache") == usual


def test_a_folder_that_is_yet_to_be_made_is_the_usual_one(tmp_path: Path) -> None:
    usual = tmp_path / "a" / "b"
    assert user_folder("STRATA_NO_SUCH_VARIABLE", lambda: usual, "cache") == usual
    assert list(tmp_path.iterdir()) == []
