"""A conversation as token ids: the model's own tokenizer and chat template, or plain text to be continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.cli.prompt import Room
from strata.errors import UsageError
from strata.gguf.reader import GGUFFile
from strata.runtime.answer import AnswerParser, ToolCall
from strata.runtime.chat import ChatTemplate
from strata.runtime.tokenizer import StreamDecoder, Tokenizer


class Conversation:
    """What was said so far.

    Parameters
    ----------
    file : GGUFFile
        Tokenizer and chat template come from its metadata.
    chat : bool
        False continues the text as it is, without a template.
    system : str, optional
        The system message.
    room : Room
        What a sequence must fit into.
    think : bool, optional
        Whether the model is to think before it answers; None leaves it to the model's template.

    Raises
    ------
    UsageError
        A system message or a word on thinking without a chat, or a template that has no switch for thinking.
    UnsupportedModel, ModelFileError
        The file's tokenizer or template cannot be used.
    """

    def __init__(
        self, file: GGUFFile, *, chat: bool, system: str | None, room: Room, think: bool | None = None
    ) -> None:
        if system is not None and not chat:
            raise UsageError("use --system", "--no-chat has no system message", "Leave one of the two out")
        if think is not None and not chat:
            raise UsageError("use --think or --no-think", "--no-chat has no template to say so", "Leave one out")
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self._template = (
            ChatTemplate.from_metadata(
                file.metadata, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token
            )
            if chat
            else None
        )
        self._variables = {} if think is None or self._template is None else self._template.thinking(think)
        self._system: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._text = ""
        self._room = room
        self._prompt = ""

    def ask(self, prompt: str) -> list[int]:
        """Add what the person says; return the whole sequence that the model is to continue.

        Raises
        ------
        UsageError
            It is longer than the context.
        """
        if self._template is None:
            self._text += prompt
            tokens = self.tokenizer.encode(self._text, parse_special=False, begin=True)
        else:
            self._messages.append({"role": "user", "content": prompt})
            self._prompt = self._template.render(self._messages, variables=self._variables)
            tokens = self.tokenizer.encode(self._prompt, parse_special=True, begin=True)
        self._room.require(len(tokens))
        return tokens

    def answered(self, text: str, reasoning: str = "", tool_calls: Sequence[ToolCall] = ()) -> None:
        """Add what the model said, thought and called."""
        if self._template is None:
            self._text += text
            return
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in tool_calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        self._messages.append(message)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._messages, self._text = list(self._system), ""

    def decoder(self) -> StreamDecoder:
        """Return a decoder for one answer's tokens."""
        return StreamDecoder(self.tokenizer, continues=self._template is None)

    def parser(self) -> AnswerParser:
        """Return what takes the answer to the last prompt apart."""
        return AnswerParser("" if self._template is None else self._template.source, self._prompt)
