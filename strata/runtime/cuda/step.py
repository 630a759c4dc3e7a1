"""One call of the model on the device: inputs in, a replay, logits out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.gguf.cuda_footprint import INPUT_ROWS, INPUT_SAMPLING
from strata.kernels.cuda_layout import Sampling
from strata.kernels.cuda_ops import CudaOps
from strata.kernels.ops import Array
from strata.runtime.cuda.chain import CudaChain, sampling_of
from strata.runtime.cuda.device import CudaDevice, array_on
from strata.runtime.cuda.embedding import HostRows
from strata.runtime.cuda.graph import Recorder, Recording
from strata.runtime.cuda.prompt import Prompts
from strata.runtime.models import Decoder
from strata.runtime.sampler import SamplerOptions

_TOKENS_AT = 4  # bytes; the position is in front of them


class NotesExperts(Protocol):
    """Told of the experts that a call asked for.

    Attributes
    ----------
    resident : bool
        Whether a step needs nothing of the host.
    """

    resident: bool

    def copy_out(self, place: int) -> None:
        """Launch, after a step, the copy of what the device has counted to a place in the host's ring."""

    def note_step(self, place: int) -> None:
        """Note a step of one token whose experts the host did not see, and whose counts are in `place` by now."""

    def note(self, ids: NDArray[np.int32], place: int) -> None:
        """Note `ids` [layers, T, K]; the counts are in `place`."""


class CudaStep:
    """Runs tokens: this backend's `strata.runtime.loader.Step`.

    A shape (number of tokens, with or without logits and a choice) is run kernel by kernel the first time, so that
    every kernel has run before it is captured, and recorded the second time.

    Parameters
    ----------
    device : CudaDevice
    ops : CudaOps
    recorder : Recorder
    decoder : Decoder
    buffers, host : mapping of str to Array
        Of `strata.gguf.cuda_footprint`: `workspace` and "logits", and `host_io`.
    rows : HostRows or None
        None where the embedding is on the device.
    experts : NotesExperts or None
    prompts : Prompts or None
        Runs more tokens than a graph is recorded for.
    """

    def __init__(
        self,
        device: CudaDevice,
        ops: CudaOps,
        recorder: Recorder,
        decoder: Decoder,
        buffers: Mapping[str, Array],
        host: Mapping[str, NDArray[Any]],
        rows: HostRows | None,
        experts: NotesExperts | None,
        prompts: Prompts | None = None,
    ) -> None:
        self._prompts = prompts
        self._device, self._ops, self._recorder, self._decoder = device, ops, recorder, decoder
        self._rows, self._experts = rows, experts
        self._most = len(buffers["x"])
        self._inputs, self._host_inputs = buffers["inputs"], host["inputs"]
        self._position = array_on(self._inputs, (1,), np.int32)
        self._tokens = array_on(self._inputs, (self._most,), np.int32, _TOKENS_AT)
        self._host_position = self._host_inputs[:_TOKENS_AT].view(np.int32)
        self._host_tokens = self._host_inputs[_TOKENS_AT : _TOKENS_AT + 4 * self._most].view(np.int32)
        self._logits, self._host_logits = buffers["logits"], host["logits"]
        self._ids = (buffers["ids"], host["ids"]) if experts else None
        self._sampling = self._inputs[INPUT_SAMPLING : INPUT_SAMPLING + ctypes.sizeof(Sampling)]
        self._chosen, self._host_chosen = buffers["chosen"], host["chosen"]
        self._recordings: dict[tuple[int, bool, bool], Recording | None] = {}
        self.launches = 0  # of graphs

    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Compile and load every kernel of every number of tokens; run and record one token."""
        with self._device.errors("compile the kernels"), self._device.stream, self._recorder.dry():
            self._ops.prepare(self._every_shape, progress)
        for _ in range(3):
            self([0], 0, logits=True)
        chain = self.chain(SamplerOptions())
        if chain is not None:
            chain(0, 0, 3)
            self._device.wait()

    def __call__(self, tokens: Sequence[int], position: int, *, logits: bool) -> NDArray[np.float32] | None:
        """See `strata.runtime.loader.Step`."""
        count = len(tokens)
        if self._prompts is not None and count > self._most:
            return self._run_prompt(self._prompts, tokens, position, logits)
        with self._device.errors(f"run {count} tokens from position {position} on"), self._device.stream:
            self._host_position[0] = position
            if self._rows is None:
                self._host_tokens[:count] = tokens
            else:
                self._host_tokens[:count] = range(count)
                self._rows.gather(tokens, self._host_inputs[INPUT_ROWS:])
            self._device.to_device(self._inputs, self._host_inputs)
            self._run(count, logits, chooses=False)
            if logits:
                self._device.to_host(self._host_logits, self._logits)
            if self._ids is not None:
                self._device.to_host(self._ids[1], self._ids[0])
            if self._experts is not None:
                self._experts.copy_out(0)
            self._device.wait()
        if self._experts is not None and self._ids is not None:
            self._experts.note(self._ids[1][:, :count], 0)
        result: NDArray[np.float32] = self._host_logits[0]
        return result if logits else None

    def chain(self, options: SamplerOptions) -> CudaChain | None:
        """See `strata.runtime.loader.Step`."""
        sampling = sampling_of(options)
        resident = self._experts is None or self._experts.resident
        return CudaChain(self, sampling) if sampling is not None and resident and self._rows is None else None

    def start(self, token: int, position: int, sampling: NDArray[np.uint8]) -> None:
        """See `RunsAhead.start`."""
        with self._device.errors(f"go on from position {position}"), self._device.stream:
            self._device.wait()  # for what an earlier chain has computed ahead, and copies
            self._host_position[0] = position
            self._host_tokens[0] = token
            self._host_inputs[INPUT_SAMPLING : INPUT_SAMPLING + len(sampling)] = sampling
            self._device.to_device(self._inputs, self._host_inputs)

    def advance(self, slot: int) -> Any:
        """See `RunsAhead.advance`."""
        with self._device.errors("run a token"), self._device.stream:
            self._run(1, logits=True, chooses=True)
            self._device.to_host(self._host_chosen[slot : slot + 1], self._chosen)
            if self._experts is not None:
                self._experts.copy_out(slot)
            return self._device.stream.record()

    def chosen(self, slot: int, event: Any) -> int:
        """See `RunsAhead.chosen`."""
        with self._device.errors("run a token"):
            event.synchronize()
        if self._experts is not None:
            self._experts.note_step(slot)
        return int(self._host_chosen[slot])

    def close(self) -> None:
        """Let go of the recorded graphs and the kernels."""
        self._device.drain()
        self._recordings.clear()
        self._ops.close()

    def _run_prompt(
        self, prompts: Prompts, tokens: Sequence[int], position: int, logits: bool
    ) -> NDArray[np.float32] | None:
        """Run a chunk, kernel by kernel: that takes the host less time than the device."""
        with self._device.errors(f"run {len(tokens)} tokens from position {position} on"), self._device.stream:
            x = prompts.forward(tokens, position)
            if logits:
                self._decoder.logits(x, self._logits)
                self._device.to_host(self._host_logits, self._logits)
            self._device.wait()
        prompts.note()
        result: NDArray[np.float32] = self._host_logits[0]
        return result if logits else None

    def _run(self, count: int, logits: bool, *, chooses: bool) -> None:
        shape = count, logits, chooses
        if shape not in self._recordings:
            self._forward(count, logits, chooses)
            self._recordings[shape] = None
            return
        recording = self._recordings[shape]
        if recording is None:
            recording = self._recordings[shape] = self._recorder.record(partial(self._forward, count, logits, chooses))
        self.launches += recording.graphs
        recording.replay()

    def _forward(self, count: int, logits: bool, chooses: bool) -> None:
        x = self._decoder.forward(self._tokens[:count], self._position)
        if logits:
            self._decoder.logits(x[count - 1 :], self._logits)
        if chooses:
            self._ops.sample(self._logits, self._sampling, self._tokens[:1], self._position, self._chosen)

    def _every_shape(self) -> None:
        for count in range(1, self._most + 1):
            self._forward(count, True, count == 1)
        if self._prompts is not None:
            self._prompts.every_shape()
