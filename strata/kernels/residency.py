"""Which experts lie in which slots, as tables that a device keeps by itself: what they are, and who leaves first.

An expert's key is ``layer * experts + expert``. A call of a layer asks for some of its experts; those that have no slot
are missing and take the slots that are worth least. The tables lie where the kernel runs, so that a step needs nothing
of the host to find its experts; `strata.kernels.numpy_residency` is the kernel's definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from strata.kernels.ops import Array

EMPTY = -1  # no slot, no owner
COUNTS = 4  # of `Tables.counts`
MOST_ASKED = 256  # experts a call asks for, tokens times top-k (kMostAsked in cuda/residency.cu)


class Policy(IntEnum):
    """What an expert in a slot is worth; ages are in calls of its own layer, the one that is being made included.

    The least worth leaves first, of equal ones that in the lower slot.
    """

    RECENCY = 0  # minus the age
    FREQUENCY_OVER_AGE = 1  # uses / (age + 1), in float32
    PROFILE = 2  # uses as they were loaded; nothing is counted


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of all layers and size classes.

    Attributes
    ----------
    slot_of : Array
        int32 [keys]: the slot, in the pool of its layer, or `EMPTY`.
    use : Array
        uint32 [keys, 2]: the call of its layer that used it last, and how many did.
    calls : Array
        uint32 [layers].
    source : Array
        uint64 [keys]: the address of the expert's bytes, laid out as in a slot, in memory that the device reads; 0
        where the host has to bring them.
    counts : Array
        uint64 [`COUNTS`]: hits, misses, evictions, and bytes that were filled from `source`.
    wanted : Array
        int32 [1 + 2 * asked]: of the last call, how many experts the host has to bring, then key and slot of each.
    """

    slot_of: Array
    use: Array
    calls: Array
    source: Array
    counts: Array
    wanted: Array
    experts: int  # of a layer
    policy: Policy


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots of one size class.

    Attributes
    ----------
    owner : Array
        int32 [slots]: the key of the expert in it, or `EMPTY`.
    data : Array
        uint8, flat; slot s starts at ``s * stride``.
    stride, nbytes : int
        Of a slot, and of an expert in it.
    word : int
        Bytes that every address in `Tables.source` of this class, and `nbytes`, are a multiple of: 2, 4, 8 or 16.
    """

    owner: Array
    data: Array
    stride: int
    nbytes: int
    word: int
