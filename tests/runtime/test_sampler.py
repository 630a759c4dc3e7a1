"""Sampling: each filter, all of them against a slow reference, the distribution drawn, and what is refused."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import StrataError, UsageError
from strata.kernels.philox import uniform
from strata.runtime.sampler import Sampler, SamplerOptions, _kth_largest, _likeliest

PLAIN = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))


def drawn(logits: np.ndarray, count: int = 300, **options: float) -> set[int]:
    sampler = Sampler(SamplerOptions(temperature=1.0, **options))
    return {sampler(logits, position) for position in range(count)}


def reference(logits: list[float], options: SamplerOptions, position: int) -> int:
    """The documented order, one Python loop a step."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if options.temperature == 0:
        return ranked[0]
    if options.top_k:
        ranked = ranked[: options.top_k]
    best = logits[ranked[0]]
    odds = {i: math.exp(logits[i] - best) for i in ranked}
    if options.top_p < 1:
        total, reached, kept = sum(odds.values()), 0.0, []
        for i in ranked:
            kept.append(i)
            reached += odds[i]
            if reached >= options.top_p * total:
                break
        ranked = kept
    ranked = [i for i in ranked if odds[i] >= options.min_p]
    weights = {i: math.exp((logits[i] - best) / options.temperature) for i in sorted(ranked)}
    target = uniform(options.seed, position) * sum(weights.values())
    reached = 0.0
    for i, weight in weights.items():
        reached += weight
        if reached > target:
            return i
    raise AssertionError("unreachable")


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler(SamplerOptions())(np.array([1, 3, 3, 2], dtype=np.float32), 0) == 1


def test_no_filter_draws_everything() -> None:
    assert drawn(PLAIN) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.85}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.6}, {1, 3}),
        # Within the top 2 the likeliest has 0.4 / 0.7 = 0.57, so 0.5 is reached at once.
        ({"top_k": 2, "top_p": 0.5}, {1}),
    ],
)
def test_filters(options: dict[str, float], kept: set[int]) -> None:
    assert drawn(PLAIN, **options) == kept


def test_filters_keep_the_lowest_ids_of_equals() -> None:
    logits = np.array([0, 1, 1, 1], dtype=np.float32)
    assert drawn(logits, top_k=2) == {1, 2}
    assert drawn(logits, top_p=0.5) == {1, 2}
    assert drawn(logits, min_p=1.0) == {1, 2, 3}


def test_minus_infinity_excludes_a_token() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], dtype=np.float32)
    assert drawn(logits) == drawn(logits, top_k=4) == drawn(logits, top_p=0.999) == {1, 3}


def test_draws_follow_the_distribution() -> None:
    count, temperature = 4000, 0.7
    sampler = Sampler(SamplerOptions(temperature=temperature, seed=11))
    counts = np.bincount([sampler(PLAIN, position) for position in range(count)], minlength=4)
    expected = np.exp(PLAIN / temperature)
    expected *= count / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 11.3  # chi-square, 3 degrees of freedom, p = 0.01


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    options = SamplerOptions(temperature=1.0, seed=5)
    sampler = Sampler(options)
    forwards = [sampler(logits, position) for position in range(20)]
    backwards = [Sampler(options)(logits, position) for position in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 15
    assert forwards != [Sampler(SamplerOptions(temperature=1.0, seed=6))(logits, p) for p in range(20)]


def test_extreme_temperatures() -> None:
    assert Sampler(SamplerOptions(temperature=1e-300))(PLAIN, 3) == 1
    assert {Sampler(SamplerOptions(temperature=1e300))(PLAIN, p) for p in range(100)} == {0, 1, 2, 3}


# Multiples of 1/4 make ties likely and keep both sides' sums equal to a few ulps; the chance that a target falls
# between the two sides' roundings is about 1e-14.
@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.integers(0, 50),
    top_p=st.sampled_from([0.013, 0.37, 0.77, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.0213, 0.31, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)
def test_all_filters_against_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    options = SamplerOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    chosen = Sampler(options)(np.array(logits, dtype=np.float32), position)
    assert chosen == reference(logits, options, position)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[0, math.nan, 1], [math.inf, 0, 0], [-math.inf] * 3])
def test_broken_logits_are_refused(bad: list[float], temperature: float) -> None:
    sampler = Sampler(SamplerOptions(temperature=temperature))
    with pytest.raises(StrataError, match="position 17"):
        sampler(np.array(bad, dtype=np.float32), 17)


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("temperature", -0.1, "--temp"),
        ("temperature", math.nan, "--temp"),
        ("temperature", math.inf, "--temp"),
        ("top_k", -1, "--top-k"),
        ("top_p", 0.0, "--top-p"),
        ("top_p", 1.01, "--top-p"),
        ("top_p", math.nan, "--top-p"),
        ("min_p", -0.1, "--min-p"),
        ("min_p", 1.1, "--min-p"),
        ("seed", -1, "--seed"),
        ("seed", 1 << 64, "--seed"),
    ],
)
def test_options_out_of_range_are_refused(field: str, value: float, option: str) -> None:
    with pytest.raises(UsageError) as refused:
        SamplerOptions(**{field: value})
    assert refused.value.asked == f"{option} {value}"


def test_options_have_a_json_form() -> None:
    options = SamplerOptions(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=(1 << 64) - 1)
    assert msgspec.json.decode(msgspec.json.encode(options), type=SamplerOptions) == options


@pytest.mark.parametrize("seed", range(20))
def test_the_kth_largest_is_that_of_a_sort(seed: int) -> None:
    """Few distinct values make ties; a length beside whole stretches leaves a rest, which at times has the largest."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 50 if seed % 2 else 10_000, int(rng.integers(5, 2000))).astype(np.float32)
    values[-3:] += np.float32(20_000 * (seed % 3))
    for k in (1, 2, 5, len(values)):
        assert _kth_largest(values, k) == np.sort(values)[-k]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.97, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1, 4])
def test_top_p_over_a_vocabulary_keeps_what_sorting_all_of_it_keeps(top_p: float, spread: float) -> None:
    """From a few tokens to nearly all; rounded logits make ties."""
    logits = np.round(np.random.default_rng(1).standard_normal(40_000) * spread, 2).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(np.exp(logits[order].astype(np.float64) - float(logits[order[0]])))
    count = int(np.searchsorted(reached, top_p * reached[-1])) + 1
    kept = _likeliest(logits, np.arange(len(logits)), top_p)
    assert abs(len(kept) - count) <= 1  # the sums' last bits
    np.testing.assert_array_equal(kept, np.sort(order[: len(kept)]))
