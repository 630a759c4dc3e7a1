"""What leaves the cache first."""

from __future__ import annotations

import numpy as np

from strata.runtime.policies import FrequencyOverAge, LeastRecentlyUsed


def order(policy: LeastRecentlyUsed | FrequencyOverAge, *calls: list[int]) -> list[int]:
    """Keys 0..3 in the order they would leave, after `calls`."""
    for call in calls:
        policy.used(np.array(call))
    return np.argsort(policy.worth(np.arange(4)), kind="stable").tolist()


def test_least_recently_used_forgets_the_oldest() -> None:
    assert order(LeastRecentlyUsed(4), [3, 1], [0], [2], [1]) == [3, 0, 2, 1]


def test_frequency_over_age_keeps_what_is_used_often_over_what_was_used_last() -> None:
    calls = [[3, 1], [3], [3], [3], [0], [2]]
    assert order(LeastRecentlyUsed(4), *calls)[0] == 1
    assert order(FrequencyOverAge(4), *calls)[-1] == 3  # 4 uses, 3 calls ago, against 1 use just now


def test_frequency_over_age_forgets_what_is_no_longer_used() -> None:
    assert order(FrequencyOverAge(4), *([[3]] * 4), *([[0], [1], [2]] * 6))[0] == 3
