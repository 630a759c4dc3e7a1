"""What the logs say of the last run: the call that was refused, planned and taken bytes, its speed and the usual one.

A run's log is JSON lines, written as things happen; a crash may have cut the last line off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from strata.doctor.cuda_codes import NAMES
from strata.doctor.facts import Probe, ProbeError, ProbeStatus, RunFacts
from strata.doctor.units import size

LONGEST_LOG = 8 << 20  # bytes that are read of one log; a longer one is a long chat
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
    facts = RunFacts(
        log=str(logs[0]),
        error=last.error,
        refusal=_refusal(last.refused) if last.refused else None,
        refused_line=last.refused.get("line") if last.refused else None,
        decode_tokens_per_s=last.decode_tokens_per_s,
        usual_decode_tokens_per_s=max(speeds, default=None),
        sources=dict.fromkeys(("refusal", "decode_tokens_per_s"), logs[0].name),
    )
    return Probe(status=ProbeStatus.OK, value=msgspec.structs.replace(facts, **last.memory()))


class _Log:
    """One log's events that say how the run went."""

    def __init__(self, path: Path) -> None:
        self.what: Any = None  # model and options: runs of the same are compared
        self.on_gpu = False
        self.refused: dict[str, Any] | None = None
        self.error: str | None = None
        self.decode_tokens_per_s: float | None = None
        self._tiers: dict[str, dict[str, Any]] = {}
        for event in _events(path):
            match event.get("event"):
                case "plan":
                    plan = event.get("plan") or {}
                    self.what = (plan.get("model"), plan.get("options"))
                    self.on_gpu = (plan.get("device") or {}).get("backend") == "cuda"
                case "allocation" if event.get("code") != "ok":
                    self.refused = event
                case "loaded":
                    self.refused = None  # a second plan held
                    self._take_memory(event)
                case "generation":
                    self._take_memory(event)
                    self._take_speed(event.get("stats") or {})
                case "error":
                    self.error = event.get("message") or event.get("type")
                    if self.refused is None and "cudaError" in str(self.error):
                        self.refused = {"code": self.error, "call": event.get("call")}

    def memory(self) -> dict[str, Any]:
        """Return the planned and taken bytes of the device and of page-locked RAM; a run on the CPU has neither."""
        fields: dict[str, Any] = {}
        for tier in ("vram", "pinned"):
            fields[f"planned_{tier}_bytes"] = self._tiers.get(tier, {}).get("planned_bytes")
            fields[f"actual_{tier}_bytes"] = self._tiers.get(tier, {}).get("allocated_bytes")
        return (
            fields if self.on_gpu else {"unknown": dict.fromkeys(fields, "not supported: the last run was on the CPU")}
        )

    def _take_memory(self, event: dict[str, Any]) -> None:
        for tier in (event.get("memory") or {}).get("tiers", ()):
            self._tiers[tier.get("tier")] = tier

    def _take_speed(self, stats: dict[str, Any]) -> None:
        tokens, seconds = stats.get("decode_tokens"), stats.get("decode_s")
        if tokens and seconds:
            self.decode_tokens_per_s = tokens / seconds


def _readable(paths: Sequence[Path]) -> Iterator[_Log]:
    for path in paths:
        try:
            yield _Log(path)
        except OSError:  # removed by another run meanwhile: it says nothing of this one
            continue


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file.read(LONGEST_LOG).splitlines():
            try:
                event = msgspec.json.decode(line)
            except msgspec.DecodeError:  # cut off by a crash
                continue
            if isinstance(event, dict):
                yield event


def _refusal(event: dict[str, Any]) -> ProbeError:
    message = str(event.get("code"))
    named = re.search(r"cudaError\w+", message)
    name = named[0] if named and named[0] in CODES else None
    nbytes, line = event.get("bytes"), event.get("line")
    asked = f"allocating {line}" + (f" ({size(nbytes)})" if isinstance(nbytes, int) else "") if line else None
    return ProbeError(
        message=message,
        code=CODES.get(name) if name else None,
        name=name,
        call=event.get("call") or asked,
    )
