"""Talking to a loaded model: one answer, or a chat; text as it comes, figures after it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from strata.cli.conversation import Conversation
from strata.cli.output import emit_json, err, say
from strata.cli.progress import steps
from strata.cli.promise import memory_rows, memory_table, range_text, speed_document
from strata.doctor.plan import Tier
from strata.doctor.speed import Range
from strata.doctor.units import GIB, size
from strata.errors import ExitCode, UsageError
from strata.runtime.answer import Content, Part, Reasoning, ToolCall
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
    reasoning: str
    tool_calls: list[ToolCall]
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
    expect : callable, optional
        Returns the expected speeds of what the figures tell of: decoding, then reading the prompt, in tokens/s. None
        where nothing is expected: a simulated GPU's speed is not that of the CPU which stands in for it.
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
        expect: Callable[[GenerationStats], tuple[Range, Range]] | None,
    ) -> None:
        self._engine = engine
        self._conversation = conversation
        self._sampler = sampler
        self._log = log
        self._seed = seed
        self._max_tokens = max_tokens
        self._expect = expect
        self._loaded = memory_rows(engine.plan, engine.memory_report())

    def answer_once(self, tokens: list[int], *, json: bool) -> ExitCode:
        """Continue what was asked and return how the program is to end: 0, or 130 when Ctrl-C stopped it."""
        if not json:
            self._say_loaded()
        answer = self._answer(tokens, stream=not json)
        if json:
            document = {
                "schema_version": 1,
                "text": answer.text,
                "reasoning": answer.reasoning,
                "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls],
                "seed": self._seed,
                "stats": answer.stats,
                "speed": speed_document(answer.stats, self._expected(answer.stats)),
                "memory": self._engine.memory_report(),
                "after_loading": self._loaded,
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
        self._say_loaded()
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
        decoder, parser = self._conversation.decoder(), self._conversation.parser()
        parts: list[Part] = []

        def add(new: list[Part]) -> None:
            for part in new:
                if stream:
                    _show(part, after=parts[-1] if parts else None)
                parts.append(part)

        with steps("tokens") as progress:
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
                add(parser.push(decoder.push(token)))
                token = _next(generation)
        except KeyboardInterrupt:  # while writing: a Ctrl-C while computing ends in `_next`
            generation.close()
        add(parser.push(decoder.finish()) + parser.finish())
        if stream:
            sys.stdout.write("\n")
            sys.stdout.flush()
        calls = [part for part in parts if isinstance(part, ToolCall)]
        answer = Answer(_joined(parts, Content), _joined(parts, Reasoning), calls, generation.stats)
        self._conversation.answered(answer.text, answer.reasoning, answer.tool_calls)
        self._log.event("generation", stats=answer.stats, memory=self._engine.memory_report())
        return answer

    def _expected(self, stats: GenerationStats) -> tuple[Range | None, Range | None]:
        return self._expect(stats) if self._expect else (None, None)

    def _say_loaded(self) -> None:
        err().print(memory_table(self._loaded), style="dim")
        err().print()

    def _say_figures(self, stats: GenerationStats) -> None:
        decode, prefill = self._expected(stats)
        figures = [
            f"prompt {_rate(stats.prefill_tokens, stats.prefill_tokens_per_s, prefill)}",
            f"answer {_rate(stats.generated_tokens, stats.decode_tokens_per_s, decode)}",
        ]
        if stats.hit_rate is not None:
            filled = sum(stats.filled_bytes.values())
            figures.append(f"experts {stats.hit_rate:.1%} hits, {stats.misses:,} misses ({size(filled)} read)")
        if stats.stop in _ENDINGS:
            figures.append(_ENDINGS[stats.stop])
        _dim("\n" + "\n".join(figures))

    def _say_memory(self) -> None:
        report = self._engine.memory_report()
        over = "less" if report.difference_bytes >= 0 else "MORE"
        _dim(
            f"memory: planned {size(report.planned_bytes)}, taken at most {size(report.peak_bytes)}"
            f" ({size(abs(report.difference_bytes))} {over} than planned) | seed {self._seed}"
        )
        if report.vram_taken_bytes is not None:
            planned = self._engine.plan.planned_bytes(Tier.VRAM)
            over = "less" if planned >= report.vram_taken_bytes else "MORE"
            _dim(
                f"VRAM: planned {size(planned)}, taken {size(report.vram_taken_bytes)} by the driver's count"
                f" ({size(abs(planned - report.vram_taken_bytes))} {over} than planned)"
            )
        loading = self._engine.loading
        if loading.kernels:
            _dim(
                f"loaded {size(loading.read_bytes)} in {loading.read_s:.1f} s"
                f" ({(loading.read_bytes_per_s or 0) / GIB:.1f} GiB/s),"
                f" {loading.kernels} kernels ready in {loading.kernels_s:.1f} s"
            )
        if self._log.path:
            _dim(f"log: {self._log.path}", wrap=False)  # to be copied whole


def _show(part: Part, *, after: Part | None) -> None:
    """Write a part as it comes: reasoning dimmed to stderr, so that stdout has the answer and nothing else."""
    if isinstance(part, Reasoning):
        err().print(part.text, style="dim", end="", markup=False, soft_wrap=True)
        return
    if isinstance(after, Reasoning):
        err().print("\n")
    elif isinstance(part, ToolCall) and after is not None:
        sys.stdout.write("\n")
    sys.stdout.write(part.text)
    sys.stdout.flush()


def _joined(parts: list[Part], kind: type[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


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


def _rate(tokens: int, per_s: float | None, speeds: Range | None) -> str:
    expected = f" (expected {range_text(speeds)})" if speeds else ""
    return f"{tokens:,} tokens" + (f" at {per_s:,.1f}/s{expected}" if per_s else "")


def _dim(text: str, *, wrap: bool = True) -> None:
    err().print(text, style="dim", markup=False, soft_wrap=not (wrap and err().is_terminal))
