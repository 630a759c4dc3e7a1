"""How a probe's end becomes records."""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec
import pytest

from strata.doctor.facts import AdapterFacts, DisplayAdapter, ProbeError, ProbeStatus
from strata.doctor.probes.child import run_probe
from strata.doctor.probes.request import ProbeStopped, Record

HALF = AdapterFacts(adapters=(DisplayAdapter(name="first"),))


def records(probe: Iterator[AdapterFacts]) -> list[Record]:
    results = io.BytesIO()
    run_probe(probe, results)
    return [msgspec.json.decode(line, type=Record) for line in results.getvalue().splitlines()]


def test_every_state_is_written_and_the_last_one_is_final() -> None:
    found = records(iter([AdapterFacts(), HALF]))
    assert [record.status for record in found] == [None, None, ProbeStatus.OK]
    assert msgspec.convert(found[-1].value, AdapterFacts) == HALF


def test_stop_keeps_what_was_known() -> None:
    def probe() -> Iterator[AdapterFacts]:
        yield HALF
        raise ProbeStopped(ProbeStatus.UNSUPPORTED, ProbeError("nothing more here"))

    last = records(probe())[-1]
    assert (last.status, last.error) == (ProbeStatus.UNSUPPORTED, ProbeError("nothing more here"))
    assert msgspec.convert(last.value, AdapterFacts) == HALF


def test_exception_is_a_failure_with_its_traceback_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    def probe() -> Iterator[AdapterFacts]:
        yield HALF
        raise PermissionError(13, "not for you")

    last = records(probe())[-1]
    assert last.status is ProbeStatus.FAILED
    assert last.error is not None
    assert (last.error.code, last.error.name) == (13, "PermissionError")
    assert last.value is not None
    assert "not for you" in capsys.readouterr().err


def test_probe_without_a_word_is_a_failure() -> None:
    (only,) = records(iter([]))
    assert (only.status, only.value) == (ProbeStatus.FAILED, None)
