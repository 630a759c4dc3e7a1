"""Applies a change that a plan offers, as a person would type it."""

from __future__ import annotations

import msgspec

from strata.doctor.plan import PlanOptions
from tests.doctor.shapes import GIB, MIB

_FIELDS = {
    "--ram-budget": "ram_budget_bytes",
    "--vram-budget": "vram_budget_bytes",
    "--vram-reserve-mib": "vram_reserve_bytes",
    "--prefill": "prefill",
    "--expert-cache": "expert_cache",
    "--kv": "kv",
    "--max-context": "max_context",
}
_STEPS = {
    "ram_budget_bytes": -MIB,
    "vram_budget_bytes": -MIB,
    "vram_reserve_bytes": MIB,
    "prefill": 1,
    "expert_cache": 1,
    "max_context": 256,
}


def applied(options: PlanOptions, typed: str) -> PlanOptions:
    """Return the options after a change such as "--kv int8 --max-context 2048"."""
    words = typed.split()
    for option, value in zip(words[::2], words[1::2], strict=True):
        options = msgspec.structs.replace(options, **{_FIELDS[option]: _value(option, value)})
    return options


def weaker(options: PlanOptions, typed: str) -> PlanOptions | None:
    """Return the options after the next weaker step of a change to one option; None where it has no steps."""
    field = _FIELDS[typed.split()[0]]
    done = applied(options, typed)
    if field not in _STEPS:
        return None
    return msgspec.structs.replace(done, **{field: getattr(done, field) + _STEPS[field]})


def _value(option: str, text: str) -> int | str:
    if option == "--kv":
        return text
    if option == "--vram-reserve-mib":
        return int(text) * MIB
    for unit, nbytes in (("GiB", GIB), ("MiB", MIB)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * nbytes
    return int(text)
