"""What the logs say of the last run: the call that was refused, planned and taken bytes, its speed and the usual one.

A run's log is JSON lines, written as things happen; a crash may have cut the last line off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from strata.doctor.cuda_codes import NAMES
from strata.doctor.facts import Probe, ProbeError, ProbeStatus, RunFacts
from strata.doctor.units import size

BEGINNING, END = 4 << 20, 4 << 20  # bytes that are read of one log: a longer one is a long chat
_WORDS = re.compile(r"(?:\w+: )?(?P<text>.*?)(?: \(-?\d+ \w+\))?", re.DOTALL)  # "cudaMalloc: out of memory (2 name)"
CODES = {name: code for code, name in NAMES.items()}


def read_last_run(logs: Sequence[Path]) -> Probe[RunFacts]:
    """Return how the last run went.

    Parameters
    ----------
    logs : sequence of Path
        Run logs, newest first; the older ones say what speed is usual for the same model and options.
    """
    if not logs:
        return Probe(status=ProbeStatus.SKIPPED, error=ProbeError(message="no run was logged here"))
    try:
        last = _Log(logs[0])
    except OSError as failure:
        error = ProbeError(message=failure.strerror or str(failure), call=f"open({logs[0]})")
        return Probe(status=ProbeStatus.FAILED, error=error)
    speeds = [speed for log in _readable(logs[1:]) if log.what == last.what and (speed := log.decode_tokens_per_s)]
    memory, unknown = last.memory()
    facts = RunFacts(
        log=str(logs[0]),
        error=last.error,
        refusal=_refusal(last.refused) if last.refused else None,
        refused_line=str(last.refused["line"]) if last.refused and last.refused.get("line") else None,
        decode_tokens_per_s=last.decode_tokens_per_s,
        usual_decode_tokens_per_s=max(speeds, default=None),
        unknown=unknown,
        sources=dict.fromkeys(("refusal", "decode_tokens_per_s"), logs[0].name),
        **memory,
    )
    return Probe(status=ProbeStatus.OK, value=facts)


class _Log:
    """One log's events that say how the run went."""

    def __init__(self, path: Path) -> None:
        self.what: Any = None  # model and options: runs of the same are compared
        self.on_gpu = False
        self.refused: dict[str, Any] | None = None
        self.error: str | None = None
        self.decode_tokens_per_s: float | None = None
        self._memory: dict[str, Any] = {}  # the last report
        self._free_when_loaded: int | None = None
        replanned = False
        for event in _events(path):
            match event.get("event"):
                case "plan":
                    plan = _mapping(event.get("plan"))
                    self.what = (plan.get("model"), plan.get("options"))
                    self.on_gpu = _mapping(plan.get("device")).get("backend") == "cuda"
                    replanned = self.refused is not None
                case "allocation" if event.get("code") != "ok":
                    self.refused, replanned = event, False
                case "loaded":
                    if replanned:  # a second plan held. Without one, the run could do without what was refused
                        self.refused = None
                    self._take_memory(event)
                    self._free_when_loaded = _count(self._memory.get("vram_free_bytes"))
                case "generation":
                    self._take_memory(event)
                    self._take_speed(_mapping(event.get("stats")))
                case "error":
                    self.error = str(event.get("message") or event.get("code") or event.get("type"))
                    self._take_driver(event)

    def memory(self) -> tuple[dict[str, int | None], dict[str, str]]:
        """Return the planned and taken bytes of the device and of page-locked RAM, and why one is unknown.

        What was taken of the device is the driver's count, which knows what no allocator of ours does.
        """
        tiers = self._memory.get("tiers")
        by_name = {str(t.get("tier")): t for t in map(_mapping, tiers if isinstance(tiers, list) else ())}
        vram, pinned = by_name.get("vram", {}), by_name.get("pinned", {})
        fields = {
            "planned_vram_bytes": _count(vram.get("planned_bytes")),
            "actual_vram_bytes": _count(self._memory.get("vram_taken_bytes")),
            "planned_pinned_bytes": _count(pinned.get("planned_bytes")),
            "actual_pinned_bytes": _count(pinned.get("allocated_bytes")),
            "vram_free_loaded_bytes": self._free_when_loaded,
        }
        if not self.on_gpu:  # a run on the CPU plans for both memories, and has neither
            return {}, dict.fromkeys(fields, "not supported: the last run was on the CPU")
        why = "the last run ended before it had loaded" if not self._memory else "the run's log does not say"
        return fields, {name: why for name, value in fields.items() if value is None}

    def _take_memory(self, event: dict[str, Any]) -> None:
        self._memory = _mapping(event.get("memory"))

    def _take_driver(self, event: dict[str, Any]) -> None:
        """Note the driver's call that the run ended with, unless it is the allocation that was already noted."""
        said = event.get("code") or (event.get("message") if "cudaError" in str(event.get("message")) else None)
        if said is None or (self.refused is not None and self.refused.get("code") == said):
            return
        self.refused = {**event, "code": said}

    def _take_speed(self, stats: dict[str, Any]) -> None:
        tokens, seconds = stats.get("decode_tokens"), stats.get("decode_s")
        if isinstance(tokens, int) and isinstance(seconds, int | float) and tokens and seconds:
            self.decode_tokens_per_s = tokens / seconds


def _readable(paths: Sequence[Path]) -> Iterator[_Log]:
    for path in paths:
        try:
            yield _Log(path)
        except OSError:  # removed by another run meanwhile: it says nothing of this one
            continue


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        text = file.read(BEGINNING)
        if file.seek(0, os.SEEK_END) > BEGINNING:
            file.seek(max(file.tell() - END, BEGINNING))
            text += file.read(END)
    for line in text.splitlines():
        try:
            event = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):  # cut off by a crash, or where the middle was left out
            continue
        if isinstance(event, dict):
            yield event


def _refusal(event: dict[str, Any]) -> ProbeError:
    """Describe a refused allocation, or the driver's call that a run ended with."""
    said = str(event.get("code"))
    found = re.search(r"cudaError\w+", f"{event.get('name')} {said}")
    number = _count(event.get("number"))
    name = event.get("name") if isinstance(event.get("name"), str) else None
    name = name or (found[0] if found else None)
    text = said
    if number is not None and (words := _WORDS.fullmatch(said)):
        text = words["text"]
        name = NAMES.get(number, name) if str(name).startswith(("cuda", "CUDA")) else name
    elif name in CODES:
        number = CODES[name]
    else:
        name = None
    free = _count(event.get("free_bytes"))
    if free is not None:
        text += f", with {size(free)} free"
    return ProbeError(message=text, code=number, name=name, call=_call(event))


def _call(event: dict[str, Any]) -> str | None:
    call, line, nbytes = event.get("call"), event.get("line"), _count(event.get("bytes"))
    what = str(call) if call else f"allocating {line}" if line else None
    if what is None or nbytes is None:
        return what
    return f"{what}({size(nbytes)})" if call else f"{what} ({size(nbytes)})"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
