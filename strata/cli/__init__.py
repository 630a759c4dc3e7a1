"""The command line. This package is the only place that prints to the terminal or ends the program."""

from __future__ import annotations


def main() -> None:
    """Run the `strata` command; never returns normally."""
    import io
    import sys

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # what a terminal or a pipe cannot show becomes "?", and is no reason to end
            stream.reconfigure(errors="replace")
    from strata.cli.app import app

    app(prog_name="strata")  # also as `python -m strata`
