"""What leaves the cache first."""

from __future__ import annotations

import numpy as np
import pytest

from strata.runtime.policies import FrequencyOverAge, LeastRecentlyUsed


def order(policy: LeastRecentlyUsed | FrequencyOverAge, *calls: list[int]) -> list[int]:
    """Keys 0..3, all of one layer, in the order they would leave, after `calls`."""
    for call in calls:
        policy.used(np.array(call))
    return np.argsort(policy.worth(np.arange(4)), kind="stable").tolist()


def test_least_recently_used_forgets_the_oldest() -> None:
    assert order(LeastRecentlyUsed(1, 4), [3, 1], [0], [2], [1]) == [3, 0, 2, 1]


def test_frequency_over_age_keeps_what_is_used_often_over_what_was_used_last() -> None:
    calls = [[3, 1], [3], [3], [3], [0], [2]]
    assert order(LeastRecentlyUsed(1, 4), *calls)[0] == 1
    assert order(FrequencyOverAge(1, 4), *calls)[-1] == 3  # 4 uses, 3 calls ago, against 1 use just now


def test_frequency_over_age_forgets_what_is_no_longer_used() -> None:
    assert order(FrequencyOverAge(1, 4), *([[3]] * 4), *([[0], [1], [2]] * 6))[0] == 3


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FrequencyOverAge])
def test_layers_are_equal_whenever_in_a_token_they_are_compared(policy: type[LeastRecentlyUsed]) -> None:
    """Each of 4 layers uses the same experts in every token, so at any point equal histories are worth the same."""
    layers, experts = 4, 3
    made = policy(layers, experts)
    for token in ([0, 1], [0, 2], [0, 1]):
        for layer in range(layers):
            made.used(layer * experts + np.array(token))
    worth = made.worth(np.arange(layers * experts)).reshape(layers, experts)
    assert (worth == worth[0]).all()
    assert (worth[:, 1] > worth[:, 2]).all()  # 2 was left out of the last token
    made.used(np.array([0, 1]))  # the next token has come as far as the first layer
    assert made.worth(np.array([0])) >= made.worth(np.array([(layers - 1) * experts]))


def test_experts_of_the_first_layer_are_not_swept_out_by_the_other_layers() -> None:
    """An expert that every token asks for in layer 0 is worth more than one asked for once in each late layer."""
    layers, experts = 40, 8
    made = FrequencyOverAge(layers, experts)
    for token in range(6):
        for layer in range(layers):
            made.used(np.array([layer * experts + (0 if layer == 0 else token)]))
    last_in_late_layer = (layers - 1) * experts + 5
    assert made.worth(np.array([0])) > made.worth(np.array([last_in_late_layer]))
