"""Where words go, and the one boundary at which errors become words and an exit code.

Answers (a report, a plan, generated text, a JSON document) go to stdout; everything said on the way goes to
stderr, so that `strata run model.gguf -p ... > answer.txt` writes the answer and nothing else.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from strata.errors import ExitCode, StrataError

if TYPE_CHECKING:
    from rich.console import Console

# In the words of what refuses it: Python's thread module, its import of a shared library.
_NO_MEMORY = ("can't start new thread", "failed to map segment", "annot allocate memory")

_WINDOWS = sys.platform == "win32"
_REPORT = "strata doctor looks for the cause; strata report writes what a person needs to help, names replaced"
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def out() -> Console:
    """Return the console of stdout."""
    from strata.cli.console import PlainConsole

    return PlainConsole(highlight=False, soft_wrap=False)


@functools.cache
def err() -> Console:
    """Return the console of stderr."""
    from strata.cli.console import PlainConsole

    return PlainConsole(stderr=True, highlight=False)


def unicode_ok(stream: object) -> bool:
    """Say whether `stream` can print box drawing and symbols; if not, ASCII is used."""
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf")


def say(text: str) -> None:
    """Print one plain line to stderr; on a terminal it is wrapped between words, elsewhere not at all."""
    err().print(text, markup=False, soft_wrap=not err().is_terminal)


def warn(text: str) -> None:
    """Print one warning line to stderr."""
    err().print(f"[yellow]warning:[/] {_escape(text)}", soft_wrap=not err().is_terminal)


def emit_json(document: object) -> None:
    """Print `document` (msgspec structs welcome) as one indented JSON document to stdout."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def emit_error(asked: str, found: str, remedy: str) -> None:
    """Print the one JSON document of a command that failed."""
    emit_json({"error": {"asked": asked, "found": found, "remedy": remedy}})


def stop(code: ExitCode) -> NoReturn:
    """End the program with `code`."""
    import typer

    raise typer.Exit(int(code))


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def fail(error: StrataError, *, json: bool) -> NoReturn:
    """Say what was asked, what was found and what to do; end with the error's exit code."""
    if json:
        emit_error(error.asked, error.found, error.remedy)
    _print_labelled("[bold red]error:[/]", error.asked)
    _print_labelled("  [bold]found[/] ", error.found)
    if error.remedy:
        _print_labelled("  [bold]do[/]    ", error.remedy)
    if error.worth_a_report:
        _print_labelled("  [bold]more[/]  ", _REPORT)
    stop(error.exit_code)


def _print_labelled(label: str, text: str) -> None:
    """Print a label and a text; on a terminal the text is wrapped in a column of its own."""
    console = err()
    if not console.is_terminal:
        console.print(f"{label} {_escape(text)}", soft_wrap=True)
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(label, _escape(text))
    console.print(table)


def boundary(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that no exception leaves it as a traceback.

    `StrataError` prints its three parts, Ctrl-C ends with 130, a closed pipe ends quietly, and anything else
    is a bug of Strata's: it is said to be one, and its traceback goes to a file that can be attached to a report.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        json = bool(kwargs.get("json"))
        try:
            return command(*args, **kwargs)
        except StrataError as error:
            fail(error, json=json)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing, and must not look like a bug
            if json:
                emit_error(f"strata {command.__name__}", "interrupted by Ctrl-C", "")
            say("interrupted")
            stop(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            _reader_left()
        except Exception as error:
            if type(error).__module__.startswith(("typer", "click")):
                raise  # typer's own exits and usage errors
            if memory_refused(error):
                error.__traceback__ = None  # its frames hold what was being done; the words need memory, too
                fail(_no_memory(error, command.__name__), json=json)
            # a full disk, a folder that cannot be written: the system's word, not our bug
            fail(_refused(error) if isinstance(error, OSError) else _bug(error), json=json)

    return run


def memory_refused(error: BaseException) -> bool:
    """Say whether the system's refusing memory (or threads, which need some) is what `error` comes from."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.EAGAIN)
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def _no_memory(error: BaseException, command: str) -> StrataError:
    lines = [line for line in str(error).splitlines() if any(words in line for words in _NO_MEMORY)]
    words = lines[0] if lines else (getattr(error, "strerror", None) or "out of memory")
    return StrataError(
        f"strata {command}",
        f"the system refuses this process memory or a thread ({words})",
        "Raise the limits on this process (ulimit -v and -u, the container's), or close other programs",
    )


def _reader_left() -> NoReturn:
    """End: who read stdout (head, less) has left. Pointing it elsewhere keeps the interpreter's last flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    stop(ExitCode.OK)


def _refused(error: OSError) -> StrataError:
    """Say what the system refused."""
    if _WINDOWS and error.errno == errno.EINVAL and error.filename is None:
        _reader_left()  # Windows' word for a broken pipe
    what = f"use {error.filename}" if error.filename else "read or write"
    return StrataError(what, f"the system refuses: {error.strerror or error}", "Check free space and permissions")


def _bug(bug: Exception) -> StrataError:
    """Describe an unexpected exception, its traceback saved to a file, or shown where no file can be written.

    The file is for an issue: names, homes and tokens in it are replaced as in a report.
    """
    import tempfile

    from strata.doctor.redact import Redactor

    said = Redactor().text("".join(traceback.format_exception(bug)))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="strata-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(said)
        remedy = f"please open an issue and attach {file.name}"
    except OSError:
        err().print(said, markup=False, soft_wrap=True)
        remedy = "please open an issue with the lines above"
    error = StrataError("strata met a bug of its own", f"{type(bug).__name__}: {bug}", remedy)
    error.worth_a_report = True
    return error
