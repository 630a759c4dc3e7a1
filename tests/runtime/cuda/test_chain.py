"""Steps ahead of the host: never more than are wanted, in order, and anew where the sequence went another way."""

from __future__ import annotations

import numpy as np
import pytest

from strata.gguf.cuda_footprint import CHOSEN
from strata.kernels.cuda_layout import Sampling
from strata.runtime.cuda.chain import CudaChain, sampling_of
from strata.runtime.sampler import SamplerOptions


class Device:
    """Chooses token + 10 after each token, one step behind the launches."""

    def __init__(self, answers: dict[int, int] | None = None) -> None:
        self.answers = answers or {}
        self.launched: list[tuple[int, int]] = []
        self.ring = [-99] * CHOSEN
        self.token = self.position = 0

    def start(self, token: int, position: int, sampling: np.ndarray) -> None:
        self.token, self.position = token, position

    def advance(self, slot: int) -> tuple[int, int]:
        self.launched.append((self.token, self.position))
        following = self.answers.get(self.token, self.token + 10)
        self.token, self.position = max(following, 0), self.position + 1
        return slot, following

    def chosen(self, slot: int, event: tuple[int, int]) -> int:
        assert event[0] == slot
        return event[1]


def chain_on(device: Device) -> CudaChain:
    sampling = sampling_of(SamplerOptions())
    assert sampling is not None
    return CudaChain(device, sampling)


def test_tokens_follow_each_other_and_none_is_computed_that_is_not_wanted() -> None:
    device = Device()
    chain = chain_on(device)
    token, found = 1, []
    for wanted in range(10, 0, -1):
        token = chain(token, 100 + 10 - wanted, wanted) or -1
        found.append(token)
        assert len(device.launched) <= 10
    assert found == list(range(11, 111, 10))
    assert device.launched == [(1 + 10 * i, 100 + i) for i in range(10)]


def test_it_runs_ahead_by_as_many_steps_as_the_ring_holds() -> None:
    device = Device()
    chain_on(device)(1, 0, 100)
    assert len(device.launched) == CHOSEN


def test_another_token_or_position_starts_anew() -> None:
    device = Device()
    chain = chain_on(device)
    assert chain(1, 0, 9) == 11
    assert chain(500, 1, 9) == 510
    assert chain(510, 7, 9) == 520
    assert (510, 7) in device.launched


def test_what_the_device_cannot_choose_is_left_to_the_host_and_then_it_goes_on() -> None:
    device = Device({11: -2})
    chain = chain_on(device)
    assert chain(1, 0, 9) == 11
    assert chain(11, 1, 9) is None
    assert chain(12, 2, 9) == 22
    assert device.launched[-CHOSEN] == (12, 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SamplerOptions(top_k=5, top_p=0.5), (0.0, 1.0, -np.inf, 1)),
        (SamplerOptions(temperature=0.5, top_k=5, top_p=0.5, min_p=1.0), (0.5, 0.5, 0.0, 5)),
        (SamplerOptions(temperature=0.5, top_k=64), (0.5, 1.0, -np.inf, 64)),
        (SamplerOptions(temperature=0.5, top_k=65), None),
        (SamplerOptions(temperature=0.5), None),
    ],
)
def test_how_to_sample(options: SamplerOptions, expected: tuple[float, float, float, int] | None) -> None:
    found = sampling_of(options)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        sampling = Sampling.from_buffer_copy(found.tobytes())
        assert (sampling.temperature, sampling.top_p, sampling.log_min_p, sampling.top_k) == expected
