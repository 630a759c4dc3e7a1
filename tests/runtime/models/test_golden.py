"""The golden models: answers that other programs gave."""

from __future__ import annotations

import numpy as np
import pytest

from tests.resident import FLOAT, QUANTISED, all_logits, load_golden, relative_error


@pytest.mark.parametrize("name", FLOAT + QUANTISED)
def test_logits_and_routing(name: str) -> None:
    model, experts, golden = load_golden(name)
    logits = all_logits(model, golden["tokens"], [len(golden["tokens"])])
    assert relative_error(logits, golden["logits"]).max() < 2e-6  # measured: 9.4e-7
    np.testing.assert_array_equal(np.stack(experts.asked), golden["routing"])
    weights = np.stack(experts.weights) / model.config.scales.residual
    np.testing.assert_allclose(weights, golden["routing_weights"], rtol=2e-5)


@pytest.mark.parametrize("name", FLOAT + QUANTISED)
def test_each_layer_alone(name: str) -> None:
    model, _, golden = load_golden(name)
    hidden = golden["hidden"]
    for index in range(len(hidden) - 1):
        x = hidden[index].copy()
        model.layer(index, x, 0)
        assert relative_error(x, hidden[index + 1]).max() < 2e-6


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("first", [1, 30, 71])
def test_prefill_then_steps(name: str, first: int) -> None:
    """The same chunks and steps give the same bits, and nearly the bits of all at once."""
    model, _, golden = load_golden(name, chunk=72)
    other, _, _ = load_golden(name, chunk=72, context=200)
    tokens = golden["tokens"]
    chunks = [first, *[1] * (len(tokens) - first)]
    steps = all_logits(model, tokens, chunks)
    np.testing.assert_array_equal(steps, all_logits(other, tokens, chunks))
    np.testing.assert_array_equal(steps, all_logits(model, tokens, chunks))  # what an earlier run left does not show
    assert relative_error(steps, all_logits(model, tokens, [len(tokens)])).max() < 1e-5
    assert relative_error(steps, golden["logits"]).max() < 1e-4


@pytest.mark.parametrize("name", FLOAT)
def test_chunks_of_any_size(name: str) -> None:
    model, _, golden = load_golden(name, chunk=25)
    logits = all_logits(model, golden["tokens"], [25, 25, 2, 20])
    assert relative_error(logits, golden["logits"]).max() < 1e-5


@pytest.mark.parametrize("name", FLOAT + QUANTISED)
def test_f16_kv_cache(name: str) -> None:
    """Half-precision keys and values cost 1e-4 to 4e-4 on these models of random weights."""
    model, _, golden = load_golden(name, kv="f16")
    error = relative_error(
        all_logits(model, golden["tokens"], [40, *[1] * (len(golden["tokens"]) - 40)]), golden["logits"]
    )
    assert 1e-5 < error.max() < 1e-3


@pytest.mark.parametrize("name", FLOAT)
def test_threads_slots_and_waves_change_no_bit(name: str) -> None:
    """Who computes, where an expert lies and in how many waves: none of it shows."""
    golden = load_golden(name)[2]
    tokens, chunks = golden["tokens"], [40, *[1] * 32]
    expected = all_logits(load_golden(name)[0], tokens, chunks)
    slots = np.random.default_rng(0).permutation(16 + 7)
    for options in (
        {"threads": 2},
        {"threads": 3},
        {"waves": 3},
        {"place": lambda layer, expert: int(slots[layer * 8 + expert]), "slots": 23, "threads": 2},
    ):
        np.testing.assert_array_equal(all_logits(load_golden(name, **options)[0], tokens, chunks), expected)
