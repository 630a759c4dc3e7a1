from __future__ import annotations

import pytest

from strata.doctor.probes.collect import Collector, Unknown


def fail(failure: Exception) -> int:
    raise failure


def test_value_with_its_source() -> None:
    found = Collector()
    found.take("a", lambda: 1, "somewhere")
    assert found.fields() == {"a": 1, "unknown": {}, "sources": {"a": "somewhere"}}


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Unknown("not told"), "not told"),
        (PermissionError(13, "Permission denied", "/x"), "PermissionError 13: [Errno 13] Permission denied: '/x'"),
        (ValueError("invalid literal"), "ValueError: invalid literal"),
        (KeyError("MemTotal"), "KeyError: 'MemTotal'"),
        (AttributeError("no such call"), "AttributeError: no such call"),
    ],
)
def test_failed_reading_is_unknown_with_the_reason_and_has_no_value(failure: Exception, reason: str) -> None:
    found = Collector()
    found.take("a", lambda: fail(failure), "somewhere")
    assert found.fields() == {
        "unknown": {"a": reason},
        "sources": {},
    }


def test_fields_read_together_are_known_or_unknown_together() -> None:
    found = Collector()
    found.take_all(("a", "b"), lambda: (1, 2))
    found.take_all(("c", "d"), lambda: fail(Unknown("no")))  # type: ignore[arg-type, return-value]
    found.take_all(("e", "f"), lambda: (1,))
    assert found.values == {"a": 1, "b": 2}
    assert set(found.unknown) == {"c", "d", "e", "f"}


def test_bugs_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        Collector().take("a", lambda: 1 // 0)
