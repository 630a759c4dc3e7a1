"""Records a step into graphs: one where the device needs nothing from the host, else one between two host actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

Action = Callable[[], None]


class _Mode(Enum):
    EAGER = auto()
    RECORDING = auto()
    DRY = auto()  # only the names of the kernels are wanted


class Recorder:
    """Runs a step as it is, or records it for `Recording`.

    Parameters
    ----------
    stream : cupy.cuda.Stream
        Current while a step runs.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._mode = _Mode.EAGER
        self._parts: list[Any] = []

    def host(self, action: Action) -> None:
        """Let the host act here, between what was launched before and what comes after: now, or in every replay."""
        if self._mode is _Mode.EAGER:
            action()
        elif self._mode is _Mode.RECORDING:
            self._parts += [self._stream.end_capture(), action]
            self._stream.begin_capture()

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Leave out host actions."""
        self._mode = _Mode.DRY
        try:
            yield
        finally:
            self._mode = _Mode.EAGER

    def record(self, step: Action) -> Recording:
        """Record `step`, whose kernels have all run before; nothing is launched."""
        self._parts = []
        self._mode = _Mode.RECORDING
        self._stream.begin_capture()
        try:
            step()
        finally:  # a capture that is left open would make the stream useless
            self._mode = _Mode.EAGER
            self._parts.append(self._stream.end_capture())
        return Recording(self._stream, self._parts)


class Recording:
    """A step that can be replayed.

    Attributes
    ----------
    graphs : int
        That a replay launches.
    """

    def __init__(self, stream: Any, parts: list[Any]) -> None:
        self._stream = stream
        self._parts = parts
        self.graphs = sum(not callable(part) for part in parts)

    def replay(self) -> None:
        """Launch it all, in order with the stream."""
        for part in self._parts:
            if callable(part):
                part()
            else:
                part.launch(self._stream)
