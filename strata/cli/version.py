"""`strata version --verbose`: what an issue has to name. No library is imported to ask for its version."""

from __future__ import annotations

import sys

from strata.cli.output import emit_json, out


def show_version(*, verbose: bool, json: bool) -> None:
    """Print Strata's version; `verbose` adds those of Python, the system, libraries and the NVIDIA driver."""
    from strata import __version__

    found: dict[str, str | None] = {"strata": __version__}
    if verbose:
        found |= _surroundings()
    if json:
        emit_json(found)
    elif not verbose:
        out().print(f"strata {__version__}", markup=False)
    else:
        width = max(map(len, found))
        for name, value in found.items():
            out().print(f"{name:<{width}}  {value or 'not found'}", markup=False, soft_wrap=True)


def _surroundings() -> dict[str, str | None]:
    from strata.doctor.versions import versions

    found: dict[str, str | None] = {**versions()}
    found["python"] = f"{found['python']} ({sys.executable})"
    if not any(name.startswith("cupy") for name in found):
        found["cupy"] = None
    return found | {"driver": _driver()}


def _driver() -> str | None:
    """Ask the driver's library, in a child process that may hang or crash without taking this one along."""
    from strata.doctor.gather import GatherOptions, gather

    facts = gather(GatherOptions(groups=("nvml",), time_limits_s={"nvml": 5.0})).nvml.value
    if facts is None or facts.driver_version is None:
        return None
    return facts.driver_version + (f", up to CUDA {facts.cuda_driver_version}" if facts.cuda_driver_version else "")
