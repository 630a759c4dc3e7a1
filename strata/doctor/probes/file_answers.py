"""Tells a disk that does not answer from one that does, before this process touches it and hangs with it."""

from __future__ import annotations

import sys

from strata.doctor.facts import ProbeStatus
from strata.doctor.probes.runner import Job, run_jobs

TIME_LIMIT_S = 15.0  # a disk that has to spin up takes up to ten
# A pipe would wait for its writer, so only a regular file is opened.
CODE = """
import os, stat, sys
if stat.S_ISREG(os.stat(sys.argv[1]).st_mode):
    with open(sys.argv[1], "rb", buffering=0) as file:
        file.read(1)
"""


def file_answers(path: str, time_limit_s: float = TIME_LIMIT_S) -> bool:
    """Say whether `path` can be looked at at all, even if only to learn that it is not there.

    A network share whose server is gone makes whoever touches it wait inside the kernel, where nothing can end it: so
    a child touches it first.
    """
    job = Job("file", time_limit_s, (sys.executable, "-I", "-S", "-c", CODE, path))
    return run_jobs([job])["file"].status is not ProbeStatus.TIMED_OUT
