"""The command line. This package is the only place that prints to the terminal or ends the program."""

from __future__ import annotations


def main() -> None:
    """Run the `strata` command; never returns normally."""
    import os
    import signal

    try:
        _prepare()
        from strata.cli.app import app

        app(prog_name="strata")  # also as `python -m strata`
    except KeyboardInterrupt:  # while modules were loaded; later ones are the commands' own
        os.write(2, b"interrupted\n")
        os._exit(130)
    except (MemoryError, ImportError, OSError, RuntimeError) as error:  # before a command began, or while it ended
        from strata.cli.output import memory_refused

        if not memory_refused(error):
            raise
        os.write(2, b"error: the system refuses this process the memory to begin with\n")
        os._exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: what is left is the interpreter's own end


def _prepare() -> None:
    """Set up what holds for the whole process: its streams, its signals, its libraries."""
    import os
    import signal
    from types import FrameType

    from strata.cli.streams import prepare_streams

    prepare_streams()
    # The numpy backend shares its work out itself, so BLAS never uses threads of its own; where they cannot be started,
    # OpenBLAS would interrupt the process while it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what was begun is cleaned up on the way out

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is signal.SIG_DFL:  # nohup has had SIGHUP ignored, and so it stays
            signal.signal(number, end)
