"""A real model on a GPU beside the definition: how far apart the distributions of its next tokens are."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.demo]
pytest.importorskip("cupy")

from strata.runtime.engine import Engine  # noqa: E402
from strata.runtime.sampler import Sampler, SamplerOptions  # noqa: E402
from strata.runtime.tokenizer import Tokenizer  # noqa: E402

from ...demo import open_demo  # noqa: E402
from ..plans import planned as planned_for_cpu  # noqa: E402
from .machine import planned  # noqa: E402

TOKENS = 200


def log_probabilities(engine: Engine, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Of the token after the prompt and after each of the answer: float64 [len(answer) + 1, V]."""
    rows = [engine.prefill(prompt).copy()] + [engine.decode(token).copy() for token in answer]
    logits = np.stack(rows).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_the_demo_is_close_to_the_definition(kv: str) -> None:
    with open_demo() as file:
        prompt = Tokenizer.from_metadata(file.metadata).encode("The sea is", parse_special=False)
        with Engine.load(file, planned_for_cpu(file, max_context=256)) as engine:
            sampler = Sampler(SamplerOptions(temperature=0.8, top_k=40, seed=3))
            answer = list(engine.generate(prompt, sampler, max_tokens=TOKENS - 1))
            engine.resume([0])  # back to the start
            expected = log_probabilities(engine, prompt, answer)
        with Engine.load(file, planned(file, max_context=256, kv=kv)) as engine:
            found = log_probabilities(engine, prompt, answer)
    divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
    same = (expected.argmax(axis=1) == found.argmax(axis=1)).mean()
    print(
        f"\ndemo {kv}: KL at most {divergence.max():.2e}, likeliest token the same at {same:.1%} of {len(found)}",
        end="",
    )
    assert len(found) == TOKENS
    assert divergence.max() < 1e-3
    assert same >= 0.98


def test_the_same_answer_from_both() -> None:
    sampler = Sampler(SamplerOptions(temperature=0.8, top_k=40, seed=3))
    answers = []
    with open_demo() as file:
        for plan in (planned(file, max_context=256), planned_for_cpu(file, max_context=256)):
            with Engine.load(file, plan) as engine:
                answers.append(list(engine.generate([1, 2, 3], sampler, max_tokens=TOKENS)))
    assert answers[0] == answers[1]
