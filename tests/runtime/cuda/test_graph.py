"""Recording a step: one graph, or one between two host actions; a step that fails leaves no capture open."""

from __future__ import annotations

import pytest

from strata.runtime.cuda.graph import Recorder


class Graph:
    def __init__(self, stream: Stream, launched: list[str]) -> None:
        self.stream, self.launched = stream, launched

    def launch(self, stream: Stream) -> None:
        assert stream is self.stream
        stream.ran += self.launched


class Stream:
    """Keeps the names of what was launched: now, or into the graph that is captured."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.captured: list[str] | None = None

    def kernel(self, name: str) -> None:
        (self.ran if self.captured is None else self.captured).append(name)

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Graph:
        assert self.captured is not None
        launched, self.captured = self.captured, None
        return Graph(self, launched)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_replay_does_what_the_step_does(layers: int) -> None:
    stream = Stream()
    recorder = Recorder(stream)

    def step() -> None:
        stream.kernel("embed")
        for layer in range(layers):
            stream.kernel(f"route {layer}")
            recorder.host(lambda layer=layer: stream.ran.append(f"host {layer}"))
            stream.kernel(f"experts {layer}")

    step()
    eager, stream.ran = stream.ran, []
    recording = recorder.record(step)
    assert stream.ran == []
    assert recording.graphs == layers + 1
    for _ in range(2):
        recording.replay()
        assert stream.ran == eager
        stream.ran = []


def test_a_dry_run_leaves_the_host_out() -> None:
    recorder = Recorder(Stream())
    with recorder.dry():
        recorder.host(lambda: pytest.fail("it acted"))


def test_a_step_that_fails_leaves_the_stream_usable() -> None:
    stream = Stream()
    recorder = Recorder(stream)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.record(fail)
    assert stream.captured is None
    recorder.host(lambda: stream.ran.append("host"))
    assert stream.ran == ["host"]
