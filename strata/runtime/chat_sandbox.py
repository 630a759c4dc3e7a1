"""Runs one chat template in a process of its own: started by `strata.runtime.chat`, which ends it when it takes long.

A template is a program that came with a model file. Jinja's sandbox keeps it from reaching anything outside, counters
end one that loops or writes without end, and the system's own limit ends one that takes memory. What is left, one
expression that computes for hours, ends with the process.

This file is run by its path, not imported, by whatever starts it: it uses the standard library and Jinja alone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 100_000  # loop rounds and macro calls of one rendering; real templates need a few per message
MAX_CHARACTERS = 1 << 24  # of one rendered prompt, far beyond any context


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """Compile a template and, where variables are given, render it.

    Parameters
    ----------
    request : Mapping
        ``source``, the template; ``variables``, what it may read, absent to compile only.

    Returns
    -------
    dict
        ``text``, what it wrote; or ``refusal``, what it says against this conversation; or ``problem``, why it
        cannot be used.
    """
    try:
        environment = _Sandbox()
        tree = environment.parse(request["source"])
        _count_steps(tree)
        code = environment.compile(tree, filename="<chat template>")
        if "variables" not in request:
            return {"text": ""}
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        return {"text": _written(template, request["variables"])}
    except _Refusal as refusal:
        return {"refusal": str(refusal.message)}
    except jinja2.TemplateSyntaxError as error:
        return {"problem": f"line {error.lineno}: {error.message}"}
    except SyntaxError as error:  # what Jinja lets through and Python refuses, such as a break outside a loop
        return {"problem": error.msg}
    except jinja2.TemplateError as error:
        return {"problem": str(error)}
    except MemoryError:
        return {"problem": "it takes more memory than a template may"}
    except RecursionError:
        return {"problem": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001  foreign code ran: whatever it raises is the template's fault
        return {"problem": f"{type(error).__name__}: {error}"}


def _written(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise _TooMuch(f"it writes more than {MAX_CHARACTERS:,} characters")
    return "".join(pieces)


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _TooMuch(jinja2.TemplateError):
    """The template went beyond its bounds."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """One rendering's environment: white space, filters and functions as chat templates expect them."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._steps = 0

    def step(self) -> None:
        """Count one loop round or macro call."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooMuch(f"it takes more than {MAX_STEPS:,} loop rounds and macro calls")


def _count_steps(tree: nodes.Template) -> None:
    """Make every loop body and macro of a parsed template begin with a call of `_Sandbox.step`."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.For)]
    blocks += [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for block in blocks:
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(step).set_lineno(block.lineno))


def _refuse(message: str) -> None:
    raise _Refusal(str(message))


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter it escapes neither HTML nor (unless asked) what is not ASCII."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Answer the one request on stdin (JSON) on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; who started this one ends it
    request = json.load(sys.stdin)
    # Windows has no such limit, and a stricter one may stand already. The memory is watched from outside as well.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
    json.dump(answer(request), sys.stdout)


if __name__ == "__main__":
    main()
