"""The engine: a model loaded by its plan, at a position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan
from strata.errors import DeviceFailed, PlanInfeasible, PlanMismatch, UsageError
from strata.gguf.reader import GGUFFile
from strata.kernels.residency import Policy
from strata.runtime.expert_cache import CacheCounts
from strata.runtime.generation import Generation, PrefillProgress, Sampler
from strata.runtime.loader import (
    Backend,
    Chain,
    CompileProgress,
    LoadedModel,
    LoadFigures,
    LoadOptions,
    LoadProgress,
    MakePolicy,
    Timed,
    open_backend,
)
from strata.runtime.memory import PlannedMemory, Taker, allocation_event
from strata.runtime.models import load_config
from strata.runtime.policies import FrequencyOverAge
from strata.runtime.process_memory import MemoryReport, anonymous_bytes
from strata.runtime.profile import write_profile
from strata.runtime.sampler import SamplerOptions

_STEPS_A_LOOK = 64  # at the process's memory

Logits = NDArray[np.float32]


class EventLog(Protocol):
    """Where a run's events go: `RunLog.event`."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """Log one event."""


def _log_nothing(kind: str, **fields: Any) -> None:
    """Log nothing: an `EventLog` for those who want none."""


class Engine:
    """Computes logits. `load` makes one; leaving it as a context manager, or `close`, frees everything.

    Its position moves when a forward pass has ended, so Ctrl-C anywhere leaves it at the last complete position.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: AllocationPlan,
        memory: PlannedMemory,
        backend: Backend,
        log: EventLog,
        loading: LoadFigures,
        held: Callable[[], int] = anonymous_bytes,
        profile: Path | None = None,
    ) -> None:
        self.plan = plan
        self._profile = profile
        self.log = log
        self._model = model
        self._memory = memory
        self._backend = backend
        self._held = held
        self._peak = held()
        self.loading = loading

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        plan: AllocationPlan,
        *,
        progress: LoadProgress = lambda done, total: None,
        log: EventLog = _log_nothing,
        compiling: CompileProgress = lambda done, total: None,
        take: Taker | None = None,
        held: Callable[[], int] = anonymous_bytes,
        policy: MakePolicy = FrequencyOverAge,
        device_policy: Policy = Policy.FREQUENCY_OVER_AGE,
        profile: Path | None = None,
    ) -> Self:
        """Take every line of the plan, then read the model. Whatever goes wrong, nothing stays allocated.

        Parameters
        ----------
        file : GGUFFile
            Stays the caller's, and must stay open as long as the engine.
        plan : AllocationPlan
        progress : LoadProgress
        log : EventLog
        compiling : CompileProgress
            Told of kernels that are compiled, on a GPU.
        take : Taker, optional
            An allocator in place of the backend's own.
        held : callable
            Bytes that this process holds, however the plan's memories are counted.
        policy : MakePolicy
            Which expert leaves the cache.
        device_policy : Policy
            The same where a device sees to it by itself.
        profile : Path, optional
            What earlier runs asked for (`strata.runtime.profile`); `close` adds what this one did.

        Raises
        ------
        PlanInfeasible, PlanMismatch
            There is nothing to load by this plan.
        UnsupportedModel
            The model asks for what is not implemented.
        AllocationFailed
            A memory refused a line: the caller may plan again, with less of that memory.
        DeviceFailed
            The GPU is not there, does not start, or failed.
        """
        config = load_config(file)
        _check_plan(plan, config.facts.header_sha256)
        log("plan", plan=plan)
        with ExitStack() as undo:
            backend = undo.enter_context(open_backend(plan))
            memory = undo.enter_context(
                PlannedMemory(
                    plan,
                    take=take or backend.take,
                    log=lambda line, refusal: log("allocation", **allocation_event(line, refusal)),
                )
            )
            reading, building = Timed(progress), Timed(compiling)
            model = backend.load(
                file, config, plan, memory, LoadOptions(policy, reading, building, device_policy, profile)
            )
            loading = LoadFigures(reading.done, reading.seconds, building.done, building.seconds)
            engine = cls(model, plan, memory, backend, log, loading, held, profile)
            log("loaded", memory=engine.memory_report(), loading=loading, notes=model.notes)
            undo.pop_all()
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the person: what loading found that makes it slower than planned."""
        return self._model.notes

    @property
    def position(self) -> int:
        """Positions that are complete, which is where the next token goes."""
        return self._model.kv.length

    @property
    def left(self) -> int:
        """Positions until the plan's context is full."""
        return self._model.kv.left

    def resume(self, tokens: Sequence[int]) -> int:
        """Go back to the end of what is shared with `tokens`, and return that position.

        At least the last token is left to compute, for its logits.

        Raises
        ------
        UsageError
            `tokens` are more than the context holds, or none.
        """
        if not tokens:
            raise UsageError("continue a sequence", "it holds no token", "Give a prompt")
        if len(tokens) > self.plan.context:
            raise UsageError(
                f"continue a sequence of {len(tokens)} tokens",
                f"the plan's context is {self.plan.context} tokens",
                f"Shorten the prompt, or use --max-context {len(tokens) + 1} or more",
            )
        kv = self._model.kv
        kv.truncate(min(kv.shared_prefix(tokens), len(tokens) - 1))
        return kv.length

    def prefill(self, tokens: Sequence[int], progress: PrefillProgress | None = None) -> Logits:
        """Run tokens in chunks of the plan's size, from the position on.

        Parameters
        ----------
        tokens : sequence of int
            One at least, `left` at most.
        progress : PrefillProgress, optional
            Told of every chunk.

        Returns
        -------
        NDArray[np.float32], shape (V,)
            Logits after the last token. The next call overwrites them.
        """
        if not 0 < len(tokens) <= self.left:
            raise ValueError(f"{len(tokens)} tokens for {self.left} positions")
        kv, most = self._model.kv, self._model.largest_call
        last = None
        for start in range(0, len(tokens), most):
            chunk = list(tokens[start : start + most])
            last = self._model.step(chunk, kv.length, logits=start + len(chunk) == len(tokens))
            kv.tokens.extend(chunk)  # the one step that makes the chunk part of the sequence
            if len(chunk) > 1 or kv.length % _STEPS_A_LOOK == 0:  # a look takes as long as a twentieth of a quick step
                self._peak = max(self._peak, self._held())
            if progress:
                progress(start + len(chunk), len(tokens))
        assert last is not None
        return last

    def decode(self, token: int) -> Logits:
        """Run one token; see `prefill`."""
        return self.prefill([token])

    def chain(self, options: SamplerOptions) -> Chain | None:
        """Return a chain for `follow`, or None where tokens are chosen from `decode`'s logits."""
        return self._model.step.chain(options)

    def follow(self, chain: Chain, token: int, most: int) -> int | None:
        """Run one token and return the next, as a chain chose it; None, and nothing is run, where the host has to.

        Parameters
        ----------
        chain : Chain
        token : int
        most : int
            Tokens that are wanted still: no more are computed ahead.
        """
        kv = self._model.kv
        following = chain(token, kv.length, min(most, kv.left))
        if following is not None:
            kv.tokens.append(token)
            if kv.length % _STEPS_A_LOOK == 0:
                self._peak = max(self._peak, anonymous_bytes())
        return following

    def generate(
        self,
        tokens: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        progress: PrefillProgress | None = None,
    ) -> Generation:
        """Continue a sequence; see `Generation`, the iterator of token ids that this returns."""
        return Generation(self, tokens, sampler, max_tokens=max_tokens, stop_ids=stop_ids, progress=progress)

    def expert_counts(self) -> CacheCounts:
        """Return what the expert cache did since loading; nothing for a dense model."""
        return self._model.experts.counts.copy() if self._model.experts else CacheCounts()

    def take_distinct_experts(self) -> int:
        """Return how many different experts, of all layers, were asked for since this was last called."""
        if self._model.experts is None:
            return 0
        seen = self._model.experts.seen
        count = int(np.count_nonzero(seen))
        seen[...] = False
        return count

    def memory_report(self) -> MemoryReport:
        """Set planned and actual side by side; the peak is the highest at the end of a chunk or step.

        Actual is the whole process, as the plan's "context" line charges for interpreter and libraries too.
        """
        now = self._held()
        self._peak = max(self._peak, now)
        report = self._memory.report(actual_bytes=now, peak_bytes=self._peak)
        taken, free = self._backend.vram()
        return msgspec.structs.replace(report, vram_taken_bytes=taken, vram_free_bytes=free)

    def close(self) -> None:
        """Free everything. The engine cannot be used after it."""
        self._keep_profile()
        self._model.step.close()
        self._memory.free()
        self._backend.__exit__(None, None, None)

    def _keep_profile(self) -> None:
        if self._profile is None or self._model.experts is None:
            return
        try:
            uses = self._model.experts.uses()
        except DeviceFailed:  # a device that is lost has told of it, and its counts are lost, too
            return
        if uses is not None:
            write_profile(self._profile, uses)


def _check_plan(plan: AllocationPlan, header_sha256: str) -> None:
    asked = f"load {plan.model.name} by its plan"
    if not plan.feasible:
        found = plan.shortfall.sentence if plan.shortfall else "the plan is marked as infeasible"
        raise PlanInfeasible(asked, found, plan.changes[0].sentence if plan.changes else "")
    if plan.model.header_sha256 != header_sha256:
        raise PlanMismatch(asked, "the plan was made for a file with another header", "Make a new plan for this file")
    if plan.device.backend not in ("numpy", "cuda", "simulated"):  # the last is RAM too, given by another `Taker`
        raise PlanMismatch(
            asked, f"the plan is for {plan.device.name} ({plan.device.backend})", "Make a new plan with --device cpu"
        )
