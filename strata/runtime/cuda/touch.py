"""Is what was taken as VRAM really there? Where a system pages VRAM, the driver can move it to RAM without a word.

Everything still works then, at the speed of the link: a run was seen to fall from 102 to 13.7 tokens/s.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.doctor.plan import Tier
from strata.kernels.ops import Array
from strata.runtime.cuda.device import CudaDevice
from strata.runtime.memory import PlannedMemory

_LOOKS = 32  # pieces of a line that are read, spread over it
_TIMES = 2  # that each is read: the faster one counts
# VRAM is read and written at several times the speed of any link. What is not even this much faster is elsewhere.
_FASTER = 2.0
_MIB = 1 << 20


def moved_out(device: CudaDevice, memory: PlannedMemory, piece: Array, pinned: NDArray[np.uint8]) -> tuple[str, ...]:
    """Read a part of every line in VRAM and return a sentence for each that answers as slowly as RAM does.

    Parameters
    ----------
    device : CudaDevice
    memory : PlannedMemory
    piece : Array
        uint8, flat: where pieces are copied to; shorter lines are left out, as a copy's start would be all there is.
    pinned : NDArray[np.uint8], shape (any, bytes of a piece)
        Host memory, to measure the link by.
    """
    if device.integrated:  # whose VRAM is RAM
        return ()
    link = min(device.copy_seconds(piece, source) for source in pinned)
    notes = []
    for line, whole in memory.whole(Tier.VRAM):
        pieces = line.bytes // piece.nbytes
        if not pieces:
            continue
        starts = {look * (pieces - 1) // max(_LOOKS - 1, 1) * piece.nbytes for look in range(_LOOKS)}
        seconds = [
            min(device.copy_seconds(piece, whole[start : start + piece.nbytes]) for _ in range(_TIMES))
            for start in sorted(starts)
        ]
        slow = [each for each in seconds if each * _FASTER > link]
        if slow:
            moved = len(slow) / len(seconds) * line.bytes / _MIB
            notes.append(
                f"About {moved:,.0f} MiB of {line.what} ({line.id}) are not in VRAM: they are read at"
                f" {piece.nbytes / max(slow) / 1e9:,.1f} GB/s, no faster than RAM. The driver has moved them out; close"
                " what else uses the GPU, or keep more free (--vram-reserve-mib)."
            )
    return tuple(notes)
