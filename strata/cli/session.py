"""Talking to a loaded model: one answer, or a chat; text as it comes, figures after it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

from strata.cli.conversation import Conversation
from strata.cli.output import emit_json, err, say
from strata.cli.progress import steps
from strata.doctor.units import size
from strata.errors import ExitCode, UsageError
from strata.runtime.engine import Engine
from strata.runtime.generation import Generation, GenerationStats, StopReason
from strata.runtime.runlog import RunLog
from strata.runtime.sampler import Sampler

_ENDINGS = {
    StopReason.LENGTH: "stopped at --max-tokens",
    StopReason.CONTEXT: "stopped because the context is full (--max-context makes it larger)",
    StopReason.INTERRUPTED: "stopped by Ctrl-C",
}
_COMMANDS = "Chat: Ctrl-C stops an answer, /clear forgets the conversation, /exit or Ctrl-D leaves."


@dataclass(frozen=True)
class Answer:
    """What the model said, and the figures of saying it."""

    text: str
    stats: GenerationStats


class Session:
    """A loaded model and a conversation with it.

    Parameters
    ----------
    engine : Engine
    conversation : Conversation
    sampler : Sampler
    log : RunLog
    seed : int
        The sampler's, to be named where it was drawn.
    max_tokens : int, optional
        Most tokens of an answer; None is as many as the context holds.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        sampler: Sampler,
        log: RunLog,
        *,
        seed: int,
        max_tokens: int | None,
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._sampler = sampler
        self._log = log
        self._seed = seed
        self._max_tokens = max_tokens

    def answer_once(self, tokens: list[int], *, json: bool) -> ExitCode:
        """Continue what was asked and return how the program is to end: 0, or 130 when Ctrl-C stopped it."""
        answer = self._answer(tokens, stream=not json)
        if json:
            document = {
                "schema_version": 1,
                "text": answer.text,
                "seed": self._seed,
                "stats": answer.stats,
                "memory": self._engine.memory_report(),
                "plan": self._engine.plan,
                "log": str(self._log.path) if self._log.path else None,
            }
            emit_json(document)
        else:
            self._say_figures(answer.stats)
            self._say_memory()
        return ExitCode.INTERRUPTED if answer.stats.stop is StopReason.INTERRUPTED else ExitCode.OK

    def chat(self) -> None:
        """Answer until Ctrl-D or /exit; Ctrl-C stops an answer, and at the prompt the program."""
        say(_COMMANDS)
        while (prompt := _read_line()) is not None:
            match prompt.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/help":
                    say(_COMMANDS)
                    continue
                case "/clear":
                    self._conversation.clear()
                    continue
            try:
                answer = self._answer(self._conversation.ask(prompt), stream=True)
            except UsageError as error:  # too long for the context, or refused by the template: the chat goes on
                say(f"{error.asked}: {error.found}. {error.remedy}")
                self._conversation.clear()
                say("The conversation starts anew.")
                continue
            self._say_figures(answer.stats)
        self._say_memory()

    def _answer(self, tokens: list[int], *, stream: bool) -> Answer:
        decoder = self._conversation.decoder()
        pieces: list[str] = []

        def add(piece: str) -> None:
            pieces.append(piece)
            if stream:
                sys.stdout.write(piece)
                sys.stdout.flush()

        with steps(tokens=True) as progress:
            generation = self._engine.generate(
                tokens,
                self._sampler,
                max_tokens=self._max_tokens or self._engine.plan.context,
                stop_ids=self._conversation.tokenizer.eos_ids,
                progress=lambda done, total: progress("reading the prompt", done, total),
            )
            token = _next(generation)
        try:
            while token is not None:
                add(decoder.push(token))
                token = _next(generation)
        except KeyboardInterrupt:  # while writing: a Ctrl-C while computing ends in `_next`
            generation.close()
        add(decoder.finish())
        if stream:
            add("\n")
        answer = Answer("".join(pieces).removesuffix("\n"), generation.stats)
        self._conversation.answered(answer.text)
        self._log.event("generation", stats=answer.stats, memory=self._engine.memory_report())
        return answer

    def _say_figures(self, stats: GenerationStats) -> None:
        figures = [
            f"prompt {_rate(stats.prefill_tokens, stats.prefill_tokens_per_s)}",
            f"answer {_rate(stats.generated_tokens, stats.decode_tokens_per_s)}",
        ]
        if stats.hit_rate is not None:
            filled = sum(stats.filled_bytes.values())
            figures.append(f"experts {stats.hit_rate:.1%} hits, {stats.misses:,} misses ({size(filled)} read)")
        if stats.stop in _ENDINGS:
            figures.append(_ENDINGS[stats.stop])
        _dim("\n" + " | ".join(figures))

    def _say_memory(self) -> None:
        report = self._engine.memory_report()
        over = "less" if report.difference_bytes >= 0 else "MORE"
        _dim(
            f"memory: planned {size(report.planned_bytes)}, taken at most {size(report.peak_bytes)}"
            f" ({size(abs(report.difference_bytes))} {over} than planned) | seed {self._seed}"
        )
        if self._log.path:
            _dim(f"log: {self._log.path}", wrap=False)  # to be copied whole


def _next(generation: Generation) -> int | None:
    """Return the next token, None at the end or when Ctrl-C ended it."""
    try:
        return next(generation, None)
    except KeyboardInterrupt:
        return None


def _read_line() -> str | None:
    """Read what the person types, None when they leave."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history, where the system has it
    try:
        return input("\n> ")
    except EOFError:
        say("")
        return None
    except KeyboardInterrupt:
        say("")  # what follows does not belong behind the prompt
        raise


def _rate(tokens: int, per_s: float | None) -> str:
    return f"{tokens:,} tokens" + (f" at {per_s:,.1f}/s" if per_s else "")


def _dim(text: str, *, wrap: bool = True) -> None:
    err().print(text, style="dim", markup=False, soft_wrap=not (wrap and err().is_terminal))
