"""One generation: tokens out of an engine until something ends it, with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import Tier
from strata.runtime.loader import Chain
from strata.runtime.sampler import SamplerOptions

if TYPE_CHECKING:
    from strata.runtime.engine import Engine

PrefillProgress = Callable[[int, int], None]  # tokens done, tokens to do


class Sampler(Protocol):
    """Chooses a token from its logits (float32 [V]) and the position it will have, and nothing else."""

    def __call__(self, logits: NDArray[np.float32], position: int) -> int:
        """Return the id of the token at `position`."""


class StopReason(StrEnum):
    """What ended a generation."""

    STOP = "stop"  # the model said a stop token
    LENGTH = "length"  # as many tokens as were asked for
    CONTEXT = "context"  # the plan's context is full
    INTERRUPTED = "interrupted"  # Ctrl-C, or the caller asked no further


class GenerationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one generation.

    An expert counts once in each layer call that asks for it; `hit_rate` is None where no expert was asked for.
    """

    reused_tokens: int  # of the prompt, whose cells were still there
    prefill_tokens: int
    prefill_s: float
    generated_tokens: int
    decode_tokens: int  # steps: one fewer than were generated, as the first comes from the prompt's logits
    decode_s: float
    stop: StopReason | None  # None while it runs
    hit_rate: float | None
    hits: int
    misses: int
    prefill_misses: int  # those of `misses` that came while the prompt was read
    evictions: int
    filled_bytes: dict[Tier, int]  # stored bytes of the experts that were filled into slots, by where they came from

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Speed of the prompt; None when nothing was computed."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed of the steps; None before the first."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


class Generation:
    """An iterator of token ids. Interrupted anywhere, it leaves the engine ready for the next one.

    Parameters
    ----------
    engine : Engine
    tokens : sequence of int
        The whole sequence so far; the part whose cells the engine still holds is not computed again.
    sampler : Sampler
    max_tokens : int
    stop_ids : collection of int
        Tokens that end the generation and are not given out.
    progress : PrefillProgress, optional
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int,
        stop_ids: Collection[int],
        progress: PrefillProgress | None = None,
    ) -> None:
        self._engine = engine
        self._counts = engine.expert_counts()
        self._reused = self._prefilled = self._generated = self._steps = self._prefill_misses = 0
        self._prefill_s = self._decode_s = 0.0
        self._stop: StopReason | None = None
        self._ids = self._run(list(tokens), sampler, max_tokens, stop_ids, progress)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._ids)

    @property
    def stats(self) -> GenerationStats:
        """The figures up to now."""
        experts = self._engine.expert_counts() - self._counts
        return GenerationStats(
            reused_tokens=self._reused,
            prefill_tokens=self._prefilled,
            prefill_s=self._prefill_s,
            generated_tokens=self._generated,
            decode_tokens=self._steps,
            decode_s=self._decode_s,
            stop=self._stop,
            hit_rate=experts.hit_rate,
            hits=experts.hits,
            misses=experts.misses,
            prefill_misses=self._prefill_misses,
            evictions=experts.evictions,
            filled_bytes=dict(experts.filled_bytes),
        )

    def close(self) -> None:
        """End the generation where it is."""
        self._ids.close()

    def _run(
        self,
        prompt: list[int],
        sampler: Sampler,
        max_tokens: int,
        stop_ids: Collection[int],
        progress: PrefillProgress | None,
    ) -> Generator[int, None, None]:
        try:
            logits = self._prefill(prompt, progress)
            options = getattr(sampler, "options", None)  # a sampler of one's own has none
            chain = self._engine.chain(options) if isinstance(options, SamplerOptions) else None
            token = sampler(logits, self._engine.position) if max_tokens else 0
            while self._generated < max_tokens:
                if token in stop_ids:
                    self._stop = StopReason.STOP
                    return
                self._generated += 1
                yield token
                if self._generated == max_tokens:
                    break
                if not self._engine.left:
                    self._stop = StopReason.CONTEXT
                    return
                token = self._following(token, sampler, chain, max_tokens - self._generated)
            self._stop = StopReason.LENGTH
        except (KeyboardInterrupt, GeneratorExit):
            self._stop = StopReason.INTERRUPTED
            raise
        finally:
            self._engine.log("generation", stats=self.stats)

    def _prefill(self, prompt: list[int], progress: PrefillProgress | None) -> NDArray[np.float32]:
        self._reused = self._engine.resume(prompt)
        before, start = self._engine.position, time.perf_counter()
        try:
            return self._engine.prefill(prompt[self._reused :], progress)
        finally:  # an interrupted prompt still says how far it came
            self._prefill_s = time.perf_counter() - start
            self._prefilled = self._engine.position - before
            self._prefill_misses = (self._engine.expert_counts() - self._counts).misses

    def _following(self, token: int, sampler: Sampler, chain: Chain | None, wanted: int) -> int:
        """Run `token` and choose the next one: where it was computed, or here from its logits."""
        start = time.perf_counter()
        following = None if chain is None else self._engine.follow(chain, token, wanted)
        if following is None:
            logits = self._engine.decode(token)
            following = sampler(logits, self._engine.position)
        self._decode_s += time.perf_counter() - start
        self._steps += 1
        return following
