"""What loaded kernels and captured graphs take of a GPU: measured in one run, charged by the plans of the next.

How much that is cannot be known before the kernels are compiled and a graph is captured. A run notes it beside the
compiled kernels, under everything that decides it; the facts take in what fits the machine as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from strata.cli.output import warn
from strata.doctor.facts import CudaDevice, CudaFacts, Facts, Overhead
from strata.doctor.files import write_files
from strata.doctor.plan import Tier
from strata.errors import StrataError

if TYPE_CHECKING:
    from strata.runtime.engine import Engine

_MOST = 512 << 20  # bytes; more is no kernels: another program took memory of the card during the run


class _Record(msgspec.Struct, frozen=True):
    """One file: what decides an overhead, then the overhead."""

    card: str
    driver: str
    cupy: str
    kernels: str
    architecture: str
    overhead: Overhead


@contextmanager
def overhead_noted(engine: Engine, facts: Facts) -> Iterator[None]:
    """Note what the kernels and graphs of `engine` take, when all that is done with it within has ended well."""
    loaded = _beside_the_plan(engine)
    yield
    ended = _beside_the_plan(engine)
    device = _device(facts, engine.plan.device.id)
    if loaded is None or ended is None or device is None or not 0 <= loaded <= ended:
        return  # with less at the end than before, another program gave memory back meanwhile
    found = Overhead(modules_bytes=loaded, graphs_bytes=ended - loaded)
    if max(found.modules_bytes, found.graphs_bytes) > _MOST:
        return
    record = _Record(*_surroundings(facts, device), engine.plan.model.architecture, found)
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        write_files({_path(record): msgspec.json.encode(record)}, "note what kernels take", "Look at the cache folder")
    except (StrataError, OSError) as error:
        warn(f"What the kernels take could not be noted: {error}")


def with_overheads(facts: Facts) -> Facts:
    """Add what was noted of this machine's GPUs, with the driver, the CuPy and the kernels as they are."""
    cuda = facts.cuda.value
    if cuda is None or not cuda.devices:
        return facts
    records = tuple(_records())
    devices = tuple(_with_overheads(facts, device, records) for device in cuda.devices)
    value: CudaFacts = msgspec.structs.replace(cuda, devices=devices)
    return msgspec.structs.replace(facts, cuda=msgspec.structs.replace(facts.cuda, value=value))


def _with_overheads(facts: Facts, device: CudaDevice, records: tuple[_Record, ...]) -> CudaDevice:
    here = _surroundings(facts, device)
    known = {r.architecture: r.overhead for r in records if (r.card, r.driver, r.cupy, r.kernels) == here}
    return msgspec.structs.replace(device, overheads=dict(sorted(known.items())))


def _beside_the_plan(engine: Engine) -> int | None:
    """Return the VRAM that is taken beside context and allocations, None where the driver does not say."""
    report = engine.memory_report()
    context = engine.plan.line("context")
    if report.vram_taken_bytes is None or context is None or context.tier is not Tier.VRAM:
        return None
    allocated = sum(tier.allocated_bytes for tier in report.tiers if tier.tier is Tier.VRAM)
    return report.vram_taken_bytes - allocated - context.bytes


def _device(facts: Facts, uuid: str) -> CudaDevice | None:
    devices = facts.cuda.value.devices if facts.cuda.value else ()
    return next((device for device in devices if device.uuid == uuid), None)


def _surroundings(facts: Facts, device: CudaDevice) -> tuple[str, str, str, str]:
    from strata.kernels.compile import sources_sha256

    cuda, nvml = facts.cuda.value, facts.nvml.value
    driver = (nvml and nvml.driver_version) or (cuda and cuda.driver_version)
    return str(device.name), str(driver), str(cuda and cuda.cupy_version), sources_sha256()


def _folder() -> Path:
    from strata.folders import cache_folder

    return cache_folder() / "kernels"


def _path(record: _Record) -> Path:
    names = (record.card, record.driver, record.cupy, record.kernels, record.architecture)
    return _folder() / f"{sha256(chr(0).join(names).encode()).hexdigest()}.overhead"


def _records() -> Iterator[_Record]:
    """Read what was noted; a file that is none of ours, or was cut short, counts as absent."""
    for path in sorted(_folder().glob("*.overhead")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=_Record)
        except (OSError, msgspec.DecodeError):
            continue
