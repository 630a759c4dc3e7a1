"""What loading gives, whatever the backend: a model that runs tokens, by the plan's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import AllocationPlan, Reservation
from strata.errors import DeviceFailed
from strata.gguf.model_facts import ModelFacts
from strata.gguf.reader import GGUFFile
from strata.kernels.residency import Policy
from strata.runtime.expert_cache import CacheCounts
from strata.runtime.kv_cache import KvCache
from strata.runtime.memory import Block, PlannedMemory
from strata.runtime.memory import Step as Count
from strata.runtime.models import ModelConfig
from strata.runtime.policies import EvictionPolicy
from strata.runtime.sampler import SamplerOptions

LoadProgress = Callable[[int, int], None]  # bytes read, bytes to read
CompileProgress = Callable[[int, int], None]  # kernels ready, kernels in all
MakePolicy = Callable[[int, int], EvictionPolicy]  # from the number of layers, and of experts in each


class LoadFigures(msgspec.Struct, frozen=True):
    """How long loading took: the file's bytes that were read, and the kernels that were made ready."""

    read_bytes: int
    read_s: float
    kernels: int
    kernels_s: float

    @property
    def read_bytes_per_s(self) -> float | None:
        """Speed of reading; None when nothing was read."""
        return self.read_bytes / self.read_s if self.read_s else None


class Timed:
    """Passes progress on, and notes how much was done and how long it took."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self._started: float | None = None
        self.done = 0
        self.seconds = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Note and pass on one report."""
        now = time.perf_counter()
        self._started = now if self._started is None else self._started
        self.done, self.seconds = done, now - self._started
        self._progress(done, total)


@dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Attributes
    ----------
    policy : MakePolicy
        Which expert leaves the cache.
    device_policy : Policy
        The same where a device sees to it by itself.
    profile : Path, optional
        Of `strata.runtime.profile`: what was asked for in earlier runs.
    progress : LoadProgress
    compiling : CompileProgress
        Told only where kernels are compiled.
    """

    policy: MakePolicy
    progress: LoadProgress
    compiling: CompileProgress
    device_policy: Policy = Policy.FREQUENCY_OVER_AGE
    profile: Path | None = None

    def counted(self, to_read: int) -> Count:
        """Return what is told of each step of reading `to_read` bytes."""
        read = 0

        def step(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            self.progress(read, to_read)

        self.progress(0, to_read)
        return step


class Chain(Protocol):
    """Steps whose tokens are chosen where they are computed, by one set of options."""

    def __call__(self, token: int, position: int, most: int) -> int | None:
        """Run `token` at `position`; return the token that was chosen to follow, the same that `Sampler` would choose.

        Up to `most` steps, this one included, may be run ahead. None: the host must compute and choose it.
        """


class Step(Protocol):
    """Runs tokens through the model."""

    def __call__(self, tokens: Sequence[int], position: int, *, logits: bool) -> NDArray[np.float32] | None:
        """Run `tokens` from `position` on, whose KV cells are written; return the last one's logits if asked to.

        The logits, float32 [V], are overwritten by the next call.
        """

    def chain(self, options: SamplerOptions) -> Chain | None:
        """Return a chain that chooses tokens by `options`, or None where the host has to."""

    def close(self) -> None:
        """Let go of what is not the plan's memory."""


class CountsExperts(Protocol):
    """Holds the experts, and counts what was asked for."""

    @property
    def counts(self) -> CacheCounts:
        """Since loading."""

    @property
    def seen(self) -> NDArray[np.bool_]:
        """For each expert whether it was asked for; the caller may clear it."""

    def uses(self) -> NDArray[np.uint32] | None:
        """How often each was asked for, [layers, experts], this run and those of its profile; None if not counted."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    `experts` is None for a dense one; `largest_call` is in tokens; `notes` are sentences for the person: what loading
    found that makes it slower than planned.
    """

    step: Step
    kv: KvCache
    experts: CountsExperts | None
    largest_call: int
    notes: tuple[str, ...] = ()


class Backend(AbstractContextManager["Backend"], Protocol):
    """What a plan runs on, opened."""

    def take(self, reservation: Reservation) -> Block:
        """Take a reservation: the backend's `Taker`."""

    def vram(self) -> tuple[int | None, int | None]:
        """Return the driver's count of device memory: taken by this process, and free."""

    def load(
        self, file: GGUFFile, config: ModelConfig, plan: AllocationPlan, memory: PlannedMemory, load: LoadOptions
    ) -> LoadedModel:
        """Load a model into `memory`, which holds whatever was taken when this fails.

        Nothing is read before every line of the plan has been granted, so a refusal comes at once and costs nothing.

        Raises
        ------
        AllocationFailed
            A memory refused a line.
        UnsupportedModel
            The backend cannot run the model.
        DeviceFailed
        """


def open_backend(plan: AllocationPlan) -> Backend:
    """Open what a plan is for.

    Raises
    ------
    DeviceFailed
        The device is not there, or does not start.
    """
    if plan.device.backend != "cuda":  # numpy, or a simulated device's memory with it
        from strata.runtime.numpy_loader import NumpyBackend

        return NumpyBackend()
    try:
        from strata.runtime.cuda.backend import CudaBackend
    except ImportError as error:
        raise DeviceFailed(
            f"run on {plan.device.name}",
            f"CuPy or one of CUDA's Python packages is not there ({error})",
            "Install them: `strata doctor` has the command for this driver. Or use --device cpu",
        ) from error
    return CudaBackend(plan.device.id)


def expert_tensors(facts: ModelFacts) -> dict[int, tuple[str, str, str]]:
    """Return the names of the gate, up and down tensors of each layer that has experts."""
    layers = sorted(layer for size_class in facts.expert_classes for layer in size_class.layers)
    return {
        layer: (
            f"blk.{layer}.ffn_gate_exps.weight",
            f"blk.{layer}.ffn_up_exps.weight",
            f"blk.{layer}.ffn_down_exps.weight",
        )
        for layer in layers
    }
