from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from strata.doctor.facts import ProbeStatus
from strata.doctor.probes import disk
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.disk import is_rotational, mount_of, read_disk
from strata.doctor.probes.request import ProbeRequest, ProbeStopped
from tests.doctor.probes.machine_tree import lay

MOUNTS = """22 1 8:2 / / rw - ext4 /dev/sda2 rw
30 22 0:26 / /mnt/c rw - 9p C:\\134 rw
31 22 259:1 / /home/models rw - xfs /dev/nvme0n1p1 rw
33 22 0:41 / /mnt/données rw - nfs4 server:/é rw
32 22 0:40 / /mnt/my\\040disk rw - fuseblk /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/models/a.gguf", ("/home/models", "/dev/nvme0n1p1", "xfs")),
        ("/home/models2/a.gguf", ("/", "/dev/sda2", "ext4")),
        ("/mnt/c/a.gguf", ("/mnt/c", "C:\\", "9p")),
        ("/mnt/données/a.gguf", ("/mnt/données", "server:/é", "nfs4")),
        ("/mnt/my disk/a.gguf", ("/mnt/my disk", "/dev/sdb1", "fuseblk")),
    ],
)
def test_mount_is_the_longest_that_holds_the_path(tmp_path: Path, path: str, mount: tuple[str, str, str]) -> None:
    assert mount_of(Path(path), lay(tmp_path, {"proc/self/mountinfo": MOUNTS})) == mount


def disk_tree(root: Path, number: str, rotational: str) -> Path:
    """Lay out a disk sda with the partition sda2, reached by the partition's number as in sysfs."""
    lay(root, {"sys/devices/sda/queue/rotational": rotational, "sys/devices/sda/sda2/partition": "2"})
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / number).symlink_to(root / "sys/devices/sda/sda2")
    return root


@pytest.mark.parametrize(("text", "spins"), [("1\n", True), ("0\n", False)])
def test_partition_is_as_its_disk(tmp_path: Path, text: str, spins: bool) -> None:
    assert is_rotational(os.makedev(8, 2), disk_tree(tmp_path, "8:2", text)) is spins


def test_virtual_disk_does_not_know_what_it_lies_on(tmp_path: Path) -> None:
    root = disk_tree(tmp_path, "8:2", "1\n")
    lay(root, {"sys/devices/sda/device/vendor": "Msft    \n"})
    with pytest.raises(Unknown, match="virtual disk"):
        is_rotational(os.makedev(8, 2), root)
    lay(root, {"sys/devices/pci0/virtio0/block/vda/queue/rotational": "1\n"})
    (root / "sys/dev/block/254:0").symlink_to(root / "sys/devices/pci0/virtio0/block/vda")
    with pytest.raises(Unknown, match="virtual disk"):
        is_rotational(os.makedev(254, 0), root)


def test_file_system_without_a_disk_of_its_own_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(Unknown, match="overlay"):
        is_rotational(os.makedev(0, 55), tmp_path)


def test_file_of_this_machine(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(os.urandom(9 << 20))
    first, last = read_disk(model, Path("/"))
    assert first.read_bytes_per_s is None
    assert last.file_bytes == 9 << 20
    usage = psutil.disk_usage(str(tmp_path))
    assert last.total_bytes == usage.total
    assert last.free_bytes == pytest.approx(usage.free, rel=0.1)
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    assert last.mount is not None
    assert mounts[last.mount] == last.filesystem
    assert last.read_bytes_per_s is not None
    assert last.warm_read_bytes_per_s is not None
    assert min(last.read_bytes_per_s, last.warm_read_bytes_per_s) > 1e6


def test_missing_file_fails_with_its_path() -> None:
    with pytest.raises(ProbeStopped, match=r"/no/model\.gguf cannot be read: No such file") as stopped:
        list(read_disk(Path("/no/model.gguf"), Path("/")))
    assert (stopped.value.status, stopped.value.error.code) == (ProbeStatus.FAILED, 2)


def test_no_model_is_a_skip() -> None:
    with pytest.raises(ProbeStopped) as stopped:
        list(disk.probe(ProbeRequest()))
    assert stopped.value.status is ProbeStatus.SKIPPED
