"""The three standard streams, set so that text goes in and out whole on every system."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams(*, windows: bool = sys.platform == "win32") -> None:
    """Set encodings and error handling of stdin, stdout and stderr.

    What a stream cannot show becomes "?", and is no reason to end. Windows writes and reads pipes and files in the
    code page of its region, which loses what a model answers in other scripts and is no JSON: there they are UTF-8,
    unless PYTHONIOENCODING says otherwise. (Its consoles take all of Unicode.)
    """
    utf8 = windows and not os.environ.get("PYTHONIOENCODING")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if utf8 and not stream.isatty():
                stream.reconfigure(encoding="utf-8", errors="replace")
    if utf8 and isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8-sig")  # editors and PowerShell put a mark in front
