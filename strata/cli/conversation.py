"""A conversation as token ids: the model's own tokenizer and chat template, or plain text to be continued."""

from __future__ import annotations

from strata.cli.prompt import Room
from strata.errors import UsageError
from strata.gguf.reader import GGUFFile
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

    Raises
    ------
    UsageError
        A system message without a chat.
    UnsupportedModel, ModelFileError
        The file's tokenizer or template cannot be used.
    """

    def __init__(self, file: GGUFFile, *, chat: bool, system: str | None, room: Room) -> None:
        if system is not None and not chat:
            raise UsageError("use --system", "--no-chat has no system message", "Leave one of the two out")
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self._template = (
            ChatTemplate.from_metadata(
                file.metadata, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token
            )
            if chat
            else None
        )
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._text = ""
        self._room = room

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
            tokens = self.tokenizer.encode(self._template.render(self._messages), parse_special=True, begin=True)
        self._room.require(len(tokens))
        return tokens

    def answered(self, text: str) -> None:
        """Add what the model said."""
        if self._template is None:
            self._text += text
        else:
            self._messages.append({"role": "assistant", "content": text})

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._messages, self._text = list(self._system), ""

    def decoder(self) -> StreamDecoder:
        """Return a decoder for one answer's tokens."""
        return StreamDecoder(self.tokenizer)
