import platform
from pathlib import Path

import pytest

from strata.runtime import wsl


@pytest.mark.parametrize(
    ("kernel", "bridge", "found"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", True, True),
        ("6.6.87.2-microsoft-standard-WSL2", False, True),
        ("6.18.0-own-build", True, True),
        ("6.8.0-45-generic", False, False),
    ],
)
def test_wsl_is_known_by_its_kernel_or_its_bridge(
    kernel: str, bridge: bool, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: kernel)
    monkeypatch.setattr(wsl, "_BRIDGE", tmp_path if bridge else tmp_path / "dxg")
    assert wsl.under_wsl() is found
