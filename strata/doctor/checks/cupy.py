"""The CuPy package: is it there, is it alone, can it be imported."""

from __future__ import annotations

from strata.doctor.checks.check import Result, check, fail, passed
from strata.doctor.checks.machine import Machine, error_text
from strata.doctor.facts import ProbeStatus

CUPY = "cupy"


@check("STR-CUPY-NONE", "CuPy", needs=("cuda.cupy_packages",), scope=())
def no_cupy(m: Machine) -> Result | None:
    """Strata reaches the GPU through CuPy, which is not a core dependency because its package depends on the driver's
    CUDA version. Without it everything runs on the CPU."""
    if not m.nvml.gpus:
        return None
    if m.cuda.cupy_packages or m.cuda.cupy_version:
        return passed("CuPy is installed.")
    if m.facts.cuda.status not in (ProbeStatus.UNSUPPORTED, ProbeStatus.OK):
        return passed("CuPy was not looked for to the end.")
    return fail(
        "There is an NVIDIA GPU, but CuPy is not installed: Strata would run on the CPU.",
        m.says("nvml.gpus", ", ".join(m.gpus)),
        m.says("cuda", m.reason("cuda")),
        remedy=m.pip_install(),
    )


@check("STR-CUPY-TWO", "One CuPy", needs=("cuda.cupy_packages",))
def two_cupys(m: Machine) -> Result | None:
    """cupy-cuda12x and cupy-cuda13x write to the same folder; with both installed the wrong libraries are loaded, and
    removing one breaks the other."""
    packages = [name for name in m.cuda.cupy_packages if name == CUPY or name.startswith("cupy-")]
    if len(packages) < 2:
        return passed("At most one CuPy package is installed.")
    return fail(
        f"{len(packages)} CuPy packages are installed together: {', '.join(sorted(packages))}.",
        *(m.says("cuda.cupy_packages", f"{name} {m.cuda.cupy_packages[name]}") for name in sorted(packages)),
        remedy=f"pip uninstall -y {' '.join(sorted(packages))}, then: {m.pip_install()}",
    )


@check("STR-CUPY-IMPORT", "CuPy imports", needs=("cuda.cupy_version",))
def import_fails(m: Machine) -> Result | None:
    """CuPy is installed but cannot be imported: a library of the CUDA toolkit is missing, or NumPy is of a version
    that this CuPy does not know."""
    error = m.facts.cuda.error
    if error is None or error.call != "import cupy" or not m.cuda.cupy_packages:
        return passed("CuPy can be imported.") if m.cuda.cupy_packages else None
    return fail(
        "CuPy is installed but cannot be imported.",
        m.says("cuda", error_text(error)),
        *(m.says("cuda.cupy_packages", f"{n} {v}") for n, v in m.cuda.cupy_packages.items()),
        remedy=m.pip_install("--force-reinstall"),
    )
