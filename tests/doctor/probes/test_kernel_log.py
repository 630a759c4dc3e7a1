from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.doctor.probes import kernel_log as module
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.kernel_log import KEPT_LINES, kernel_log

NOISE = "misc dxg: dxgk: dxgkio_query_adapter_info: Ioctl failed: -22"


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(f"6,{n},{n * 1000},-;{text}\n SUBSYSTEM=pci\n" for n, text in enumerate(texts)))
    return path


def test_only_what_matters_in_order_and_repeats_counted(tmp_path: Path) -> None:
    log = write(
        tmp_path / "kmsg",
        "Linux version 6.18",
        NOISE,
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        "usb 1-1: new device",
        NOISE,
        "misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12",
        "Out of memory: Killed process 4242 (python)",
    )
    assert kernel_log(log) == (
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        f"{NOISE} (2 times)",
        "misc dxg: dxgk: dxgkio_make_resident: Ioctl failed: -12",
        "Out of memory: Killed process 4242 (python)",
    )


def test_noise_cannot_push_out_what_is_real(tmp_path: Path) -> None:
    log = write(tmp_path / "kmsg", "NVRM: real", *[NOISE] * 5000)
    assert kernel_log(log) == ("NVRM: real", f"{NOISE} (5000 times)")


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    log = write(tmp_path / "kmsg", *(f"NVRM: {number}" for number in range(100)))
    lines = kernel_log(log)
    assert len(lines) == KEPT_LINES
    assert lines[-1] == "NVRM: 99"


def test_overwritten_records_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [b"6,1,1,-;NVRM: one\n", BrokenPipeError(), b"6,9,9,-;NVRM: nine\n", BlockingIOError()]

    def read(file: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module.os, "read", read)
    assert kernel_log(write(tmp_path / "kmsg")) == ("NVRM: one", "NVRM: nine")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(PermissionError(1, "no"), "only be read by root"), (FileNotFoundError(2, "no"), "no kmsg here")],
)
def test_closed_log_is_unknown(monkeypatch: pytest.MonkeyPatch, failure: OSError, reason: str) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise failure

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Unknown, match=reason):
        kernel_log(Path("/dev/kmsg"))
