"""The command line. This package is the only place that prints to the terminal or ends the program."""

from __future__ import annotations


def main() -> None:
    """Run the `strata` command; never returns normally."""
    from strata.cli.streams import prepare_streams

    prepare_streams()
    from strata.cli.app import app

    app(prog_name="strata")  # also as `python -m strata`
