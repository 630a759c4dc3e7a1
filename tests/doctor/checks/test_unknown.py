"""No fact, however absurd, missing or reordered, makes a check raise or turns unknown into an answer."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.doctor.checks.machine import GROUPS, Machine
from strata.doctor.checks.registry import CATALOGUE
from strata.doctor.diagnose import diagnose
from strata.doctor.facts import Probe, ProbeError, ProbeStatus
from strata.doctor.findings import Status
from strata.doctor.markdown import plain_text
from tests.doctor.machines import PROBLEMS, cases, findings_of

ABSURD: dict[type, list[Any]] = {
    bool: [True, False],
    int: [0, -1, 1, 7, 1 << 40, 1 << 63, -(1 << 80)],
    float: [0.0, -1.0, 1e-300, 1e308, math.nan, math.inf, -math.inf],
    str: ["", "?", "0", "-1.-2", "none", "9" * 40, "13", "wsl2", "windows", "\x00\ud800", "🦆" * 50, "1.2.3.4.5.6.7.8"],
}
ANSWERS = {  # fields whose None says something: there was no such error, limit, link, variable, or line
    *("refusal", "register_refusal", "malloc_refusal", "kernel_error", "error", "refused_line", "visible_devices"),
    *("target", "version", "stderr", "code", "name", "call", "log", "usual_decode_tokens_per_s"),
}
machines = st.sampled_from(list(cases().values())).map(lambda case: case.machine())


def absurd(draw: st.DrawFn, value: Any) -> Any:
    """Return `value` with some of it replaced by nonsense of the same type, dropped, doubled or reordered."""
    if isinstance(value, ProbeStatus):
        return draw(st.sampled_from(list(ProbeStatus)))
    if isinstance(value, msgspec.Struct):
        names = draw(st.lists(st.sampled_from(value.__struct_fields__), max_size=6, unique=True))
        return msgspec.structs.replace(value, **{n: absurd(draw, getattr(value, n)) for n in names})
    if isinstance(value, tuple):
        kept = [absurd(draw, item) for item in value if draw(st.booleans())]
        return tuple(draw(st.permutations(kept + kept[:1])))
    if isinstance(value, dict):
        return {k: absurd(draw, v) for k, v in value.items() if draw(st.booleans())}
    return draw(st.sampled_from(ABSURD.get(type(value), [None])))


@st.composite
def absurd_machines(draw: st.DrawFn) -> Machine:
    machine = draw(machines)
    facts = machine.facts
    for group in draw(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4)):
        probe: Probe[Any] = getattr(facts, group)
        value = probe.value and absurd(draw, probe.value)
        status = absurd(draw, probe.status) if draw(st.booleans()) else probe.status
        facts = msgspec.structs.replace(facts, **{group: msgspec.structs.replace(probe, value=value, status=status)})
    return Machine(facts, machine.model, machine.plan, machine.options)


@settings(max_examples=150, deadline=None)
@given(absurd_machines())
def test_no_fact_makes_a_check_raise(machine: Machine) -> None:
    report = diagnose(machine.facts, model=machine.model, plan=machine.plan, options=machine.options)
    assert [f for f in report.findings if f.status is Status.CRASHED] == []
    assert plain_text(report)


def forget(draw: st.DrawFn, value: Any) -> Any:
    """Return `value` with some facts not known any more, each for a reason."""
    if isinstance(value, tuple):
        return tuple(forget(draw, item) for item in value)
    if not isinstance(value, msgspec.Struct) or isinstance(value, ProbeError):
        return value
    changes: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        if field.default is None and field.name not in ANSWERS and held is not None and draw(st.integers(0, 7)) == 0:
            changes[field.name] = None
        elif isinstance(held, (tuple, msgspec.Struct)) and field.name not in ANSWERS:
            changes[field.name] = forget(draw, held)
    return msgspec.structs.replace(value, **changes)


@st.composite
def forgetful(draw: st.DrawFn) -> tuple[Machine, Machine]:
    """A machine, and the same with facts forgotten or whole probes lost."""
    machine = draw(machines)
    facts = machine.facts
    for group in GROUPS:
        probe: Probe[Any] = getattr(facts, group)
        if probe.value is None:
            continue
        if draw(st.integers(0, 9)) == 0:
            lost = draw(st.sampled_from([ProbeStatus.TIMED_OUT, ProbeStatus.CRASHED, ProbeStatus.SKIPPED]))
            changed = Probe(status=lost, error=ProbeError(message="lost"))
        else:
            changed = msgspec.structs.replace(probe, value=forget(draw, probe.value))
        facts = msgspec.structs.replace(facts, **{group: changed})
    return machine, Machine(facts, machine.model, machine.plan, machine.options)


@settings(max_examples=150, deadline=None)
@given(forgetful())
def test_a_forgotten_fact_never_becomes_an_answer(pair: tuple[Machine, Machine]) -> None:
    known, unknown = (findings_of(machine) for machine in pair)
    for id in CATALOGUE:
        before = known[id].status if id in known else None
        after = unknown[id].status if id in unknown else None
        if id.startswith("STR-PROBE-"):  # a probe that is lost is another outcome, not an unknown one
            continue
        if before in PROBLEMS:
            assert after is not Status.PASS, id
        if after in PROBLEMS:
            assert before in PROBLEMS, id


def test_a_pass_needs_every_fact_it_names() -> None:
    for case in cases().values():
        machine = case.machine()
        for id, finding in findings_of(machine).items():
            if finding.status is Status.PASS:
                assert [machine.missing(path) for path in CATALOGUE[id].needs if machine.missing(path)] == [], id


def test_every_path_that_a_check_names_exists() -> None:
    machine = cases()["h200-server"].machine()
    for check in CATALOGUE.values():
        for path in (*check.needs, *check.scope):
            machine.missing(path)  # raises AttributeError for a name that is none
