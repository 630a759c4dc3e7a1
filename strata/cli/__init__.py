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

        if memory_refused(error):
            os.write(2, b"error: the system refuses this process the memory to begin with\n")
        elif isinstance(error, OSError):  # a help page onto a full disk
            os.write(2, f"error: the system refuses: {error.strerror or error}\n".encode())
        else:
            raise
        os._exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: what is left is the interpreter's own end


def _prepare() -> None:
    """Set up what holds for the whole process: its streams, its signals, its libraries."""
    import os
    import signal
    import sys
    from types import FrameType

    from strata.cli.streams import prepare_streams

    for number in (0, 1, 2):  # one that is closed would become that of the next file, and take what is printed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    prepare_streams()
    # The numpy backend shares its work out itself, so BLAS never uses threads of its own; where they cannot be started,
    # OpenBLAS would interrupt the process while it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what was begun is cleaned up on the way out

    for name in ("SIGTERM", "SIGHUP"):
        known = getattr(signal, name, None)
        if known and signal.getsignal(known) is signal.SIG_DFL:  # nohup has had SIGHUP ignored, and so it stays
            signal.signal(known, end)
