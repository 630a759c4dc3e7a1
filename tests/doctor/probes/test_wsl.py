from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.wsl import container_kind, wsl_signals, wsl_version
from tests.doctor.probes.machine_tree import lay

WSL2_KERNEL = "6.18.54.1-microsoft-standard-WSL2"
INTEROP = "proc/sys/fs/binfmt_misc/WSLInterop"
LIB = "usr/lib/wsl/lib/"
DISTRO = {"WSL_DISTRO_NAME": "Ubuntu"}


@pytest.mark.parametrize(
    ("kernel", "files", "environment", "version"),
    [
        pytest.param(WSL2_KERNEL, ["dev/dxg", LIB, INTEROP], DISTRO, "wsl2", id="WSL 2"),
        pytest.param(WSL2_KERNEL, [], {}, "wsl2", id="container in WSL 2 without the GPU: only the kernel tells"),
        pytest.param("6.6.87-custom", ["dev/dxg", LIB], {}, "wsl2", id="own kernel, in a container with the GPU"),
        pytest.param(
            "6.6.87-custom", ["proc/sys/fs/binfmt_misc/WSLInterop-late"], {}, "wsl2", id="own kernel, interop"
        ),
        pytest.param("6.6.87-custom", [LIB], DISTRO, "wsl2", id="two weak marks"),
        pytest.param("4.4.0-26100-Microsoft", [INTEROP], DISTRO, "wsl1", id="WSL 1"),
        pytest.param("6.8.0-45-generic", [], {}, "none", id="Linux"),
        pytest.param("6.8.0-1015-azure", [], {}, "none", id="Hyper-V guest at Azure"),
        pytest.param("6.8.0-45-generic", [LIB], {}, "none", id="image made in WSL, run on Linux"),
        pytest.param("6.8.0-45-generic", [], DISTRO, "none", id="variable passed on by ssh"),
        pytest.param("4.4.0-210-generic", [], {}, "none", id="old Ubuntu"),
    ],
)
def test_version(tmp_path: Path, kernel: str, files: list[str], environment: dict[str, str], version: str) -> None:
    root = lay(tmp_path, dict.fromkeys(files, ""))
    assert wsl_version(wsl_signals(root, environment, kernel), kernel) == version


def test_signals_name_every_mark(tmp_path: Path) -> None:
    signals = wsl_signals(lay(tmp_path, {"dev/dxg": ""}), {}, WSL2_KERNEL)
    assert signals == {
        "kernel": True,
        "/dev/dxg": True,
        "/usr/lib/wsl/lib": False,
        "WSLInterop": False,
        "environment": False,
    }


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ({".dockerenv": "", "proc/1/cgroup": "0::/"}, {}, "docker"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"run/.containerenv": ""}, {"container": "podman"}, "podman"),
        ({"proc/1/cgroup": "12:memory:/kubepods/burstable/pod1/abc\n"}, {}, "kubernetes"),
        ({"proc/1/cgroup": "5:memory:/docker/0123abcd\n"}, {}, "docker"),
        ({"proc/1/cgroup": "0::/"}, {"container": "lxc"}, "lxc"),
        ({"run/systemd/container": "systemd-nspawn\n"}, {}, "systemd-nspawn"),
        ({"proc/1/cgroup": "0::/"}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, "none"),
    ],
)
def test_container(tmp_path: Path, files: dict[str, str], environment: dict[str, str], kind: str) -> None:
    assert container_kind(lay(tmp_path, files), environment) == kind


def test_container_is_unknown_without_any_sign(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match="/proc/1/cgroup"):
        container_kind(tmp_path, {})
