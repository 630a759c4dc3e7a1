"""A GPU machine's memory that is not there: real RAM, granted and refused as a recorded machine's driver would.

`SimulatedDevice.take` is a `Taker` like any backend's. It keeps count of VRAM, page-locked and pageable memory,
refuses what goes beyond them or beyond what couples them, and refuses the calls that a `Fault` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from strata.doctor.plan import Reservation, Tier
from strata.kernels.ops import Array
from strata.runtime.driver_errors import refuses_all
from strata.runtime.memory import Block, HostBlock, MemoryRefused

MALLOC, PIN, HOST_MALLOC = "cudaMalloc", "cudaHostRegister", "malloc"
OUT_OF_MEMORY = 2

_CALLS = {Tier.VRAM: MALLOC, Tier.PINNED: PIN, Tier.PAGEABLE: HOST_MALLOC}
_A_LITTLE = 4096  # bytes of VRAM, asked for to see whether the context still works


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Calls that are refused although the memory is there.

    Among the calls whose name starts with `call` and that ask for `from_bytes` or more, the `nth` is refused and the
    `times` - 1 after it; all after it when `times` is None.
    """

    call: str = "cuda"
    nth: int = 1
    times: int | None = None
    from_bytes: int = 0
    code: int = OUT_OF_MEMORY
    name: str = ""
    string: str = ""
    sticky: bool = False  # once met, every later call of the driver is refused with the same code


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The memories of one machine in bytes; None is no limit."""

    vram_told_bytes: int  # free before this process came, as the driver's management library tells
    vram_bytes: int  # the same, as the driver grants: the second truth
    vram_taken_bytes: int = 0  # by someone else, after the plan was made
    context_bytes: int = 0  # of VRAM, that every process takes
    pinned_bytes: int | None = None  # page-locked; the first call beyond it is refused
    pin_step_bytes: int = 64 << 20  # most that one call page-locks
    ram_bytes: int | None = None
    integrated: bool = False  # VRAM is RAM
    # What couples VRAM and page-locked memory under WDDM: reports tell of three kinds.
    shared_bytes: int | None = None  # one budget for both
    registered_bytes: int | None = None  # page-locked, after which no device memory is granted
    commit_bytes: int | None = None  # everything, VRAM included, is charged against the commit limit
    faults: tuple[Fault, ...] = ()


class SimulatedDevice:
    """The driver and the system of a `SimulatedMachine`, as one process meets them."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.calls = 0
        self._used = {Tier.VRAM: machine.context_bytes, Tier.PINNED: 0, Tier.PAGEABLE: 0}
        self._met = [0] * len(machine.faults)  # calls that each fault counted
        self._stuck: Fault | None = None

    def take(self, reservation: Reservation) -> Block:
        """Take a reservation; see `Taker`.

        Raises
        ------
        MemoryRefused
            The simulated driver or system refused it.
        MemoryError, OSError
            This machine's own RAM did.
        """
        tier, nbytes = reservation.tier, reservation.bytes
        self._grant(tier, nbytes)
        try:
            block = HostBlock(nbytes)
        except BaseException:
            self._used[tier] -= nbytes
            raise
        return _Counted(self, tier, nbytes, block)

    def held_bytes(self) -> int:
        """Return what this process holds of every memory, its context included."""
        return sum(self._used.values())

    def vram_free_bytes(self) -> int:
        """Return the VRAM that is free, as the driver tells, which need not be what it grants."""
        return max(self.machine.vram_told_bytes - self.machine.vram_taken_bytes - self._used[Tier.VRAM], 0)

    def give_back(self, tier: Tier, nbytes: int) -> None:
        """Free memory that was taken."""
        self._used[tier] -= nbytes

    def _grant(self, tier: Tier, nbytes: int) -> None:
        """Take `nbytes` in as many calls as the tier needs: all of them, or none."""
        step = self.machine.pin_step_bytes if tier is Tier.PINNED else nbytes
        granted = 0
        while granted < nbytes:
            part = min(step, nbytes - granted)
            refusal = self._refusal(_CALLS[tier], part, tier)
            if refusal is not None:
                self._used[tier] -= granted
                raise self._error(tier, refusal, granted)
            self._used[tier] += part
            granted += part

    def _refusal(self, call: str, nbytes: int, tier: Tier) -> Fault | None:
        """Make one call: say how it is refused, None when it is granted."""
        self.calls += 1
        if self._stuck is not None and call.startswith("cuda"):
            return self._stuck
        for place, fault in enumerate(self.machine.faults):
            if not call.startswith(fault.call) or nbytes < fault.from_bytes:
                continue
            self._met[place] += 1
            after = self._met[place] - fault.nth
            if after >= 0 and (fault.times is None or after < fault.times):
                self._stuck = fault if fault.sticky else self._stuck
                return fault
        if nbytes > min(self._room(tier)):
            return _FULL_RAM if tier is Tier.PAGEABLE else _FULL
        return None

    def _room(self, tier: Tier) -> Iterator[int]:
        """Yield what each limit on `tier` leaves."""
        machine, used = self.machine, self._used
        ram = used[Tier.PINNED] + used[Tier.PAGEABLE] + (used[Tier.VRAM] if machine.integrated else 0)
        if tier is Tier.VRAM:
            yield machine.vram_bytes - machine.vram_taken_bytes - used[Tier.VRAM]
            if machine.registered_bytes is not None and used[Tier.PINNED] > machine.registered_bytes:
                yield 0
        if tier is Tier.PINNED and machine.pinned_bytes is not None:
            yield machine.pinned_bytes - used[Tier.PINNED]
        if tier is not Tier.PAGEABLE and machine.shared_bytes is not None:
            yield machine.shared_bytes - machine.vram_taken_bytes - used[Tier.VRAM] - used[Tier.PINNED]
        if machine.ram_bytes is not None and (tier is not Tier.VRAM or machine.integrated):
            yield machine.ram_bytes - ram
        if machine.commit_bytes is not None:
            yield machine.commit_bytes - sum(used.values())
        yield 1 << 62  # no limit

    def _error(self, tier: Tier, fault: Fault, granted: int) -> MemoryRefused:
        free = {Tier.VRAM: self.vram_free_bytes(), Tier.PAGEABLE: max(min(self._room(Tier.PAGEABLE)), 0)}.get(tier)
        # Out of memory is a budget, unless it is the first answer. Any other code may mean that nothing works any more.
        held = self._used[Tier.VRAM] + self._used[Tier.PINNED] - self.machine.context_bytes
        first = tier is Tier.VRAM and not held
        broken = first or (tier is not Tier.PAGEABLE and fault.code != OUT_OF_MEMORY)
        if broken:  # perhaps: asking for a little tells
            little = self._refusal(MALLOC, _A_LITTLE, Tier.VRAM)
            broken = refuses_all(
                little.code if little else None,
                out_of_memory=OUT_OF_MEMORY,
                held_bytes=held,
                free_bytes=self.vram_free_bytes(),
                little=_A_LITTLE,
            )
        return MemoryRefused(
            _CALLS[tier],
            fault.code,
            fault.name,
            fault.string,
            free_bytes=None if broken else free,  # then that call is refused, too
            granted_bytes=granted,
            broken=broken,
        )


_FULL = Fault(name="cudaErrorMemoryAllocation", string="out of memory")
_FULL_RAM = Fault(call=HOST_MALLOC, code=12, name="ENOMEM", string="Cannot allocate memory")


class _Counted:
    """A block of real RAM that stands for a tier's memory."""

    def __init__(self, device: SimulatedDevice, tier: Tier, nbytes: int, block: HostBlock) -> None:
        self._device, self._tier, self._nbytes, self._block = device, tier, nbytes, block

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """See `Block`."""
        return self._block.array(offset, shape, dtype)

    def release(self) -> None:
        """See `Block`."""
        self._block.release()
        self._device.give_back(self._tier, self._nbytes)
