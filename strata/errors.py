"""Every error that Strata raises on purpose, and the exit code each one ends the program with.

A `StrataError` is one message in three parts: what was asked, what was found, what to do. The command line
prints the three and nothing else; a traceback that reaches a person is a bug of ours.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the program's exit status means; documented in the README and never reused for another meaning."""

    OK = 0
    FAILED = 1  # a check failed, the plan is infeasible, the model is refused, or the run broke
    USAGE = 2  # wrong use: an unknown option, a path that does not exist, options that contradict
    UNDETERMINED = 3  # the answer could not be determined
    INTERRUPTED = 130  # Ctrl-C


class StrataError(Exception):
    """An error a person can act on.

    Parameters
    ----------
    asked : str
        What was being attempted, in the user's terms ("open model foo.gguf").
    found : str
        What was found instead.
    remedy : str
        The exact next step that helps.
    """

    exit_code: ExitCode = ExitCode.FAILED
    worth_a_report: bool = False  # its cause may lie in the machine or in Strata: a report helps to find it

    def __init__(self, asked: str, found: str, remedy: str) -> None:
        super().__init__(f"{asked}: {found}. {remedy}" if remedy else f"{asked}: {found}.")
        self.asked = asked
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:  # an error crosses from a worker process as it is
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UsageError(StrataError):
    """The command was used wrongly: a bad option value, a path that does not exist."""

    exit_code = ExitCode.USAGE


class ModelFileError(StrataError):
    """The model file cannot be read: truncated, corrupt, hostile, not a GGUF at all, a shard missing."""


class UnsupportedModel(StrataError):
    """The file is sound, but it asks for an architecture or a feature that has no implementation yet."""


class DemoUnavailable(StrataError):
    """The demo model could neither be found in the cache nor fetched."""


class ModelUnavailable(StrataError):
    """A model of a hub can be neither found in the cache nor fetched whole and unharmed."""


class PlanInfeasible(StrataError):
    """No plan fits. `found` names the line and the missing bytes, `remedy` the smallest change that works."""


class PlanMismatch(StrataError):
    """A saved plan does not belong to this model, device or schema, or its memory is no longer there."""


class PlanViolation(StrataError):
    """The runtime asked for memory outside its plan: always a bug of ours, never the user's doing."""

    worth_a_report = True


class Undetermined(StrataError):
    """A question (often a probe) could not be answered either way."""

    exit_code = ExitCode.UNDETERMINED


class KernelError(StrataError):
    """A kernel could not be compiled, loaded or launched."""

    worth_a_report = True


class DeviceFailed(StrataError):
    """A CUDA device does not start, failed while it ran, or was lost."""

    worth_a_report = True


class AllocationFailed(StrataError):
    """A memory refused a planned reservation at load time.

    Parameters
    ----------
    line : str
        Id of the plan's reservation that was refused.
    nbytes : int
        Bytes that were asked for.
    """

    worth_a_report = True

    def __init__(self, asked: str, found: str, remedy: str, *, line: str, nbytes: int) -> None:
        super().__init__(asked, found, remedy)
        self.line = line
        self.nbytes = nbytes
