"""Tells WSL 1, WSL 2 and containers apart from the marks each leaves; a container inside WSL keeps only some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strata.doctor.probes.collect import Unknown

# One of these alone is proof. The others can be left over in an image or be passed on by ssh.
_STRONG = ("kernel", "/dev/dxg", "WSLInterop")


def wsl_signals(root: Path, environment: Mapping[str, str], kernel: str) -> dict[str, bool]:
    """Return every mark of WSL that is looked for, and whether it is there."""
    return {
        "kernel": "microsoft" in kernel.lower(),
        "/dev/dxg": (root / "dev/dxg").exists(),
        "/usr/lib/wsl/lib": (root / "usr/lib/wsl/lib").is_dir(),
        "WSLInterop": any((root / "proc/sys/fs/binfmt_misc").glob("WSLInterop*")),
        "environment": "WSL_DISTRO_NAME" in environment or "WSL_INTEROP" in environment,
    }


def wsl_version(signals: Mapping[str, bool], kernel: str) -> str:
    """Return "none", "wsl1" or "wsl2".

    WSL 1 has no Linux kernel: it answers 4.4.0 with "Microsoft" behind. A WSL 2 kernel that people build
    themselves may lack the word, so one strong mark, or two weak ones, are enough.
    """
    if signals["kernel"] and kernel.startswith("4.4.") and not signals["/dev/dxg"]:
        return "wsl1"
    weak = sum(found for mark, found in signals.items() if mark not in _STRONG)
    return "wsl2" if weak > 1 or any(signals[mark] for mark in _STRONG) else "none"


def container_kind(root: Path, environment: Mapping[str, str]) -> str:
    """Return "none" or the container runtime that this process runs under."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "apptainer"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    for marker in (root / "run/systemd/container", root / "run/host/container-manager"):
        if marker.is_file():
            return marker.read_text().strip() or "unnamed"
    if environment.get("container"):
        return environment["container"]
    try:
        first_process = (root / "proc/1/cgroup").read_text()
    except OSError as failure:
        raise Unknown(f"no mark of a container was found, and /proc/1/cgroup cannot be read: {failure}") from None
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("libpod", "podman"), ("lxc", "lxc")):
        if word in first_process:
            return kind
    return "none"
