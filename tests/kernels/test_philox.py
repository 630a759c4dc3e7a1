"""The published Random123 vectors, and what samplers need of the draws."""

import numpy as np
import pytest

from strata.kernels.philox import philox4x32, uniform

# Random123's known-answer file, lines "philox4x32 10".
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_many_counters_at_once_equal_one_by_one() -> None:
    counters, keys = (np.stack([words(vector[column]) for vector in VECTORS]) for column in (0, 1))
    np.testing.assert_array_equal(philox4x32(counters, keys), [words(vector[2]) for vector in VECTORS])


def test_uniform_takes_the_top_53_bits() -> None:
    # The first two output words of the zero vector, 6627e8d5 e169c58d.
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_uniform_uses_all_bits_of_seed_and_position() -> None:
    draws = {uniform(seed, position) for seed in (0, 1, 1 << 32, (1 << 64) - 1) for position in (0, 1, 1 << 32)}
    assert len(draws) == 12
    assert all(0 <= draw < 1 for draw in draws)


def test_uniform_is_flat() -> None:
    draws = np.array([uniform(7, position) for position in range(2000)])
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 21.7  # chi-square, 9 degrees of freedom, p = 0.01
