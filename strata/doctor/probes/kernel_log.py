"""Lines of the kernel log that concern GPUs, WSL's GPU bridge and processes killed for memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from strata.doctor.probes.collect import Unknown

KEPT_LINES = 40
_MATTERS = re.compile(
    r"NVRM|\bXid\b|nvidia|nouveau|dxgk|oom-kill|Out of memory|Memory cgroup out of memory|PCIe Bus Error", re.IGNORECASE
)
_BLOCK = 16384  # longer than any record: a shorter read would be refused


def kernel_log(device: Path) -> tuple[str, ...]:
    """Return the last distinct lines that matter, oldest first; a repeated one is given once, with its count.

    Parameters
    ----------
    device : Path
        ``/dev/kmsg``: records ``priority,sequence,microseconds,flags;text``, each followed by lines of details
        that start with a blank.

    Raises
    ------
    Unknown
        When the log may not be read.
    """
    counts: dict[str, int] = {}
    for record in _records(device):
        text = record.partition(";")[2]
        if not record.startswith(" ") and _MATTERS.search(text):
            counts[text] = counts.pop(text, 0) + 1  # moves it to the end
    lines = (text if count == 1 else f"{text} ({count} times)" for text, count in counts.items())
    return tuple(lines)[-KEPT_LINES:]


def _records(device: Path) -> list[str]:
    try:
        log = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        raise Unknown("the kernel log may only be read by root here (kernel.dmesg_restrict)") from None
    except FileNotFoundError:
        raise Unknown(f"there is no {device.name} here") from None
    blocks: list[bytes] = []
    try:
        while True:
            try:
                block = os.read(log, _BLOCK)
            except BrokenPipeError:
                continue  # records were overwritten while we read; the next read goes on after the gap
            if not block:
                break
            blocks.append(block)
    except BlockingIOError:
        pass  # the end of the log
    except PermissionError:
        raise Unknown("the kernel log may only be read by root here (kernel.dmesg_restrict)") from None
    finally:
        os.close(log)
    return b"".join(blocks).decode(errors="replace").splitlines()
