"""The command line. This package is the only place that prints to the terminal or ends the program."""

from __future__ import annotations


def main() -> None:
    """Run the `strata` command; never returns normally."""
    import io
    import os
    import sys

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # what a terminal or a pipe cannot show becomes "?", and is no reason to end
            stream.reconfigure(errors="replace")
    # The numpy backend shares its work out itself, so BLAS never uses threads of its own; where they cannot be started,
    # OpenBLAS would interrupt the process while it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from strata.cli.app import app

        app()
    except (MemoryError, ImportError, OSError, RuntimeError) as error:  # before a command began, or while it ended
        from strata.cli.output import memory_refused

        if not memory_refused(error):
            raise
        os.write(2, b"error: the system refuses this process the memory to begin with\n")
        os._exit(1)
