"""Where what can be fetched again is kept."""

import os
import sys
from pathlib import Path

import pytest

from strata.sources.cache import VARIABLE, cache_folder


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
    assert cache_folder() == Path("/tmp") / f"strata-cache-{os.getuid()}"
