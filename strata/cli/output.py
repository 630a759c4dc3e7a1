"""Where words go, and the one boundary at which errors become words and an exit code.

Answers (a report, a plan, generated text, a JSON document) go to stdout; everything said on the way goes to
stderr, so that `strata run model.gguf -p ... > answer.txt` writes the answer and nothing else.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from strata.errors import ExitCode, StrataError

if TYPE_CHECKING:
    from rich.console import Console

_REPORT = "strata doctor looks for the cause; strata report writes what a person needs to help, names replaced"
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def out() -> Console:
    """Return the console of stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


@functools.cache
def err() -> Console:
    """Return the console of stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def unicode_ok(stream: object) -> bool:
    """Say whether `stream` can print box drawing and symbols; if not, ASCII is used."""
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf")


def say(text: str) -> None:
    """Print one plain line to stderr."""
    err().print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print one warning line to stderr."""
    err().print(f"[yellow]warning:[/] {_escape(text)}", soft_wrap=True)


def emit_json(document: object) -> None:
    """Print `document` (msgspec structs welcome) as one indented JSON document to stdout."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


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
        emit_json({"error": {"asked": error.asked, "found": error.found, "remedy": error.remedy}})
    console = err()
    console.print(f"[bold red]error:[/] {_escape(error.asked)}", soft_wrap=True)
    console.print(f"  [bold]found[/]  {_escape(error.found)}", soft_wrap=True)
    if error.remedy:
        console.print(f"  [bold]do[/]     {_escape(error.remedy)}", soft_wrap=True)
    if error.worth_a_report:
        console.print(f"  [bold]more[/]   {_REPORT}", soft_wrap=True)
    stop(error.exit_code)


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
            say("interrupted")
            stop(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            # The reader (head, less) has left: point stdout elsewhere so that the interpreter's last flush is quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop(ExitCode.OK)
        except OSError as error:  # a full disk, a folder that cannot be written: the system's word, not our bug
            fail(_refused(error), json=json)
        except Exception as bug:
            if type(bug).__module__.startswith(("typer", "click")):
                raise  # typer's own exits and usage errors
            fail(_bug(bug), json=json)

    return run


def _refused(error: OSError) -> StrataError:
    """Say what the system refused."""
    what = f"use {error.filename}" if error.filename else "read or write"
    return StrataError(what, f"the system refuses: {error.strerror or error}", "Check free space and permissions")


def _bug(bug: Exception) -> StrataError:
    """Describe an unexpected exception, its traceback saved to a file, or shown where no file can be written."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="strata-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            traceback.print_exception(bug, file=file)
        remedy = f"please open an issue and attach {file.name}"
    except OSError:
        traceback.print_exception(bug)
        remedy = "please open an issue with the lines above"
    error = StrataError("strata met a bug of its own", f"{type(bug).__name__}: {bug}", remedy)
    error.worth_a_report = True
    return error
