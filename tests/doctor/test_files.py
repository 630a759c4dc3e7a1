"""Files are whole or not there, links and devices are honoured, and modes are what the person is used to."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from strata.doctor.files import write_files
from strata.errors import ExitCode, StrataError, UsageError

posix = pytest.mark.skipif(sys.platform == "win32", reason="modes, links and devices of POSIX")


def write(*paths: Path, data: bytes = b"new") -> None:
    write_files(dict.fromkeys(paths, data), "save it", "Choose another path")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(path, data=b"old")
    write(path)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_a_new_file_has_the_usual_mode_and_a_replaced_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    before = os.umask(0o027)
    try:
        write(path)
        assert mode(path) == 0o640
        path.chmod(0o600)
        write(path)
        assert mode(path) == 0o600
    finally:
        os.umask(before)


@posix
def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write(link)
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


@posix
def test_a_read_only_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(UsageError, match="read-only"):
        write(path)
    assert path.read_bytes() == b"old"


def test_a_folder_and_a_missing_folder_are_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this is a folder"):
        write(tmp_path)
    with pytest.raises(UsageError, match="No such file or directory"):
        write(tmp_path / "missing" / "plan.json")
    with pytest.raises(UsageError):
        write(tmp_path / ("x" * 300))
    with pytest.raises(UsageError):
        write(Path("nul\0byte"))


@posix
def test_devices_and_pipes_are_written_straight(tmp_path: Path) -> None:
    write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_wrong_use() -> None:
    with pytest.raises(StrataError, match="No space left") as refusal:
        write(Path("/dev/full"))
    assert refusal.value.exit_code is ExitCode.FAILED


def test_all_files_are_written_or_none(tmp_path: Path) -> None:
    first = tmp_path / "report.md"
    with pytest.raises(UsageError):
        write(first, tmp_path / "missing" / "report.zip")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_old_file_survives_whatever_breaks_off_the_writing(
    tmp_path: Path, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def fail(fd: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((StrataError, KeyboardInterrupt)):
        write(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
