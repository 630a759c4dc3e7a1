"""Chunks of a prompt on the device: more tokens than the decode kernels take, launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.gguf.cuda_prompt_footprint import prompt_rows_at
from strata.kernels.cuda_layout import MOST_TOKENS
from strata.kernels.cuda_ops import CudaSlots
from strata.kernels.cuda_prompt import PromptOps
from strata.kernels.ops import Array
from strata.runtime.cuda.device import CudaDevice, array_on
from strata.runtime.cuda.embedding import HostRows
from strata.runtime.cuda.experts import ResidentExperts
from strata.runtime.models import Decoder

_TOKENS_AT = 4  # bytes; the position is in front of them


class PromptExperts:
    """Experts of a chunk, all of which have slots: this path's `strata.runtime.models.Experts`.

    Parameters
    ----------
    ops : PromptOps
    slots : mapping of int to CudaSlots
        By layer.
    counts : Array, int32 [layers, N]
        Becomes how many tokens chose each expert.
    """

    def __init__(self, ops: PromptOps, slots: Mapping[int, CudaSlots], counts: Array) -> None:
        self._ops, self._slots, self._counts = ops, slots, counts

    def add(self, layer: int, hidden: Array, ids: Array, weights: Array, residual: Array) -> None:
        """See `strata.runtime.models.Experts.add`; `hidden` is what `PromptOps.route` has made of it."""
        self._ops.experts_add(self._slots[layer], ids, weights, residual, self._counts[layer])


class Prompts:
    """Runs chunks.

    Parameters
    ----------
    device : CudaDevice
    decoder : Decoder
        On `PromptOps`.
    buffers, host : mapping of str to Array
        Those of `strata.gguf.cuda_footprint` whose names start with ``prompt.``, without that.
    rows : HostRows or None
        None where the embedding is on the device.
    experts : ResidentExperts or None

    Attributes
    ----------
    most : int
        Tokens of a chunk.
    """

    def __init__(
        self,
        device: CudaDevice,
        decoder: Decoder,
        buffers: Mapping[str, Array],
        host: Mapping[str, NDArray[Any]],
        rows: HostRows | None,
        experts: ResidentExperts | None,
    ) -> None:
        self._device, self._decoder, self._rows, self._experts = device, decoder, rows, experts
        self.most = most = len(buffers["x"])
        self._inputs, self._host_inputs = buffers["inputs"], host["inputs"]
        self._position = array_on(self._inputs, (1,), np.int32)
        self._tokens = array_on(self._inputs, (most,), np.int32, _TOKENS_AT)
        self._host_position = self._host_inputs[:_TOKENS_AT].view(np.int32)
        self._host_tokens = self._host_inputs[_TOKENS_AT : _TOKENS_AT + 4 * most].view(np.int32)
        self._counts = (buffers["counts"], host["counts"]) if experts else None

    def forward(self, tokens: Sequence[int], position: int) -> Array:
        """Launch a chunk from `position` on; return the last token's residual stream, [1, E]."""
        count = len(tokens)
        self._host_position[0] = position
        if self._rows is None:
            self._host_tokens[:count] = tokens
        else:
            self._host_tokens[:count] = range(count)
            self._rows.gather(tokens, self._host_inputs[prompt_rows_at(self.most) :])
        self._device.to_device(self._inputs, self._host_inputs)
        x = self._decoder.forward(self._tokens[:count], self._position)
        if self._counts is not None:
            self._device.to_host(self._counts[1], self._counts[0])
        return x[count - 1 :]

    def note(self) -> None:
        """Tell the experts what the chunk asked for, once it is complete."""
        if self._experts is not None and self._counts is not None:
            self._experts.note_counts(self._counts[1])

    def every_shape(self) -> None:
        """Launch what there is for any number of tokens: tiles grow with it, and none is passed over in these steps."""
        count = float(MOST_TOKENS + 1)
        while count < self.most:
            self._decoder.forward(self._tokens[: int(count)], self._position)
            count *= 1.25
        self._decoder.forward(self._tokens, self._position)
