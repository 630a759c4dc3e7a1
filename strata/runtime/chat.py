"""Messages to prompt: the model's own chat template, run in a process of its own with bounds on time and memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from strata.errors import ModelFileError, Undetermined, UsageError

MAX_SECONDS = 10.0  # for one rendering, the start of the process (about 0.1 s) included
MAX_MEMORY = 512 << 20  # bytes of that process; Python and Jinja take about 30 MiB

_KEY = "tokenizer.chat_template"
_REMEDY = "Use --no-chat to send the text as it is, or a file of this model with a working template"
_POLL_S = 0.05
# The names under which published templates take "think first" or "answer at once".
_THINKING_SWITCHES = ("enable_thinking", "thinking")


class ChatTemplate:
    """A model's chat template.

    Parameters
    ----------
    source : str
        Jinja source.
    bos_token, eos_token : str
        Texts that templates may write; empty where the model has none.

    Attributes
    ----------
    source : str

    Raises
    ------
    ModelFileError
        The source is not valid Jinja, or does not compile within the bounds.
    Undetermined
        The process it is compiled in could not be started.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        _run({"source": source})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, bos_token: str = "", eos_token: str = "") -> ChatTemplate:
        """Take the template that a GGUF header carries.

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

    def thinking(self, think: bool) -> dict[str, bool]:
        """Return the variables that switch thinking on or off in this template.

        Raises
        ------
        UsageError
            The template has no such switch.
        """
        switches = [name for name in _THINKING_SWITCHES if re.search(rf"\b{name}\b", self.source)]
        if not switches:
            raise UsageError(
                "use --think" if think else "use --no-think",
                "this model's chat template has no switch for thinking",
                "Leave the option out",
            )
        return dict.fromkeys(switches, think)

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
            Each with `role` and `content`, and whatever else the template reads; JSON values only.
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
        Undetermined
            The process it is rendered in could not be started.
        """
        return _run(
            {
                "source": self.source,
                "variables": {
                    **self._tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                },
            }
        )


def _run(request: dict[str, Any]) -> str:
    """Have the sandbox process answer one request; return the text that it wrote."""
    answer = _answer(json.dumps({**request, "memory_bytes": MAX_MEMORY}).encode())
    if "refusal" in answer:
        raise UsageError(
            "write the chat prompt",
            f"the model's chat template refuses this conversation: {answer['refusal'].rstrip('.')}",
            "Change the messages (roles, order), or use --no-chat",
        )
    if "problem" in answer:
        raise _broken(answer["problem"])
    return answer["text"]


def _answer(request: bytes) -> dict[str, str]:
    # By path and with -P: this folder must not become the process's import path, it has names of libraries in it.
    command = [sys.executable, "-P", str(Path(__file__).with_name("chat_sandbox.py"))]
    with tempfile.TemporaryFile() as asked:
        asked.write(request)
        asked.seek(0)
        try:
            process = subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise Undetermined(
                "use the model's chat template", f"no process could be started for it ({error})", _REMEDY
            ) from None
        with process:
            try:
                written, said = _wait(process)
            finally:
                process.kill()
    try:
        answer: dict[str, str] = json.loads(written)
    except ValueError:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise _broken(f"its process ended with code {process.returncode}: {last or 'it said nothing'}") from None
    return answer


def _wait(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return what the process wrote on stdout and stderr, unless it takes too long or too much."""
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        try:
            return process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            raise _broken(f"it does not end within {MAX_SECONDS:g} seconds")
        try:
            taken = psutil.Process(process.pid).memory_info().rss
        except psutil.Error:  # it has just ended
            continue
        if taken > MAX_MEMORY:
            raise _broken("it takes more memory than a template may")


def _broken(problem: str) -> ModelFileError:
    return ModelFileError("use the model's chat template", problem.rstrip("."), _REMEDY)
