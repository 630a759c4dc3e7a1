"""Messages to prompt: the model's own chat template, run in a sandbox with bounds.

A template is a program that came with a model file. Jinja's sandbox keeps it from reaching anything outside; the
bounds here end one that never stops looping or writing. One expression can still be made slow on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata.errors import ModelFileError, UsageError

MAX_STEPS = 100_000  # loop rounds and macro calls of one rendering; real templates need a few per message
MAX_CHARACTERS = 1 << 24  # of one rendered prompt, far beyond any context

_KEY = "tokenizer.chat_template"
_REMEDY = "Use --no-chat to send the text as it is, or a file of this model with a working template"


class ChatTemplate:
    """A model's chat template, compiled.

    Parameters
    ----------
    source : str
        Jinja source.
    bos_token, eos_token : str
        Texts that templates may write; empty where the model has none.

    Raises
    ------
    ModelFileError
        The source is not valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Sandbox()
        try:
            tree = environment.parse(source)
            _count_steps(tree)
            self._code = environment.compile(tree, filename="<chat template>")
        except jinja2.TemplateSyntaxError as error:
            raise _broken(f"line {error.lineno}: {error.message}") from None
        except SyntaxError as error:  # what Jinja lets through and Python refuses, such as a break outside a loop
            raise _broken(error.msg) from None
        except RecursionError:
            raise _broken("it is nested too deeply") from None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
        """Compile the template that a GGUF header carries.

        Raises
        ------
        UsageError
            The file has none, so it cannot chat.
        ModelFileError
            It is not a string, or not valid Jinja.
        """
        source = metadata.get(_KEY)
        if source is None:
            raise UsageError(
                "chat with this model",
                f"its file has no chat template ({_KEY})",
                "Use --no-chat to complete plain text",
            )
        if not isinstance(source, str):
            raise _broken("it is not a string")
        return cls(source, bos_token=bos_token, eos_token=eos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation the way the model was trained to read it.

        Parameters
        ----------
        messages : sequence of mappings
            Each with `role` and `content`, and whatever else the template reads.
        tools : sequence of mappings, optional
            Functions that the model may call, as JSON schemas.
        add_generation_prompt : bool
            Whether to end with the opening of the assistant's answer.
        variables : mapping, optional
            More variables for the template, e.g. ``{"enable_thinking": False}``.

        Raises
        ------
        UsageError
            The template itself refuses these messages.
        ModelFileError
            The template fails, or does not end within its bounds.
        """
        environment = _Sandbox()
        template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
        pieces = template.generate(
            {
                **self._tokens,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        written: list[str] = []
        length = 0
        try:
            for piece in pieces:
                written.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise _TooMuch(f"it writes more than {MAX_CHARACTERS:,} characters")
        except _Refusal as refusal:
            raise UsageError(
                "write the chat prompt",
                f"the model's chat template refuses this conversation: {refusal.message}",
                "Change the messages (roles, order), or use --no-chat",
            ) from None
        except jinja2.TemplateError as error:
            raise _broken(str(error)) from None
        except Exception as error:  # noqa: BLE001  foreign code ran: whatever it raises is the template's fault
            raise _broken(f"{type(error).__name__}: {error}") from None
        return "".join(written)


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


def _broken(problem: str) -> ModelFileError:
    return ModelFileError("use the model's chat template", problem.rstrip("."), _REMEDY)
