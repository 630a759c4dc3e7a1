"""Whether this runs in WSL2, for what is said when memory is refused; the doctor looks at more signs than these."""

from __future__ import annotations

import platform
from pathlib import Path

_BRIDGE = Path("/dev/dxg")  # to Windows' GPU driver; a kernel that somebody built may not have the word


def under_wsl() -> bool:
    """Return whether this process runs in WSL2."""
    return "microsoft" in platform.release().lower() or _BRIDGE.exists()
