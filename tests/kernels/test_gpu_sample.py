"""The token that the device chooses is the one that the definition chooses."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from strata.kernels.cuda_layout import NOT_FINITE, TOO_MANY  # noqa: E402
from strata.kernels.cuda_ops import CudaOps  # noqa: E402
from strata.runtime.cuda.chain import sampling_of  # noqa: E402
from strata.runtime.sampler import Sampler, SamplerOptions  # noqa: E402

OPTIONS = [
    SamplerOptions(),
    SamplerOptions(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1),
    SamplerOptions(temperature=1.5, top_k=64, seed=2**63 + 5),
    SamplerOptions(temperature=0.3, top_k=7, top_p=0.5, seed=3),
    SamplerOptions(temperature=2.0, top_k=33, min_p=0.3, seed=4),
    SamplerOptions(temperature=1.0, top_k=1, top_p=0.01, min_p=1.0, seed=5),
]


class Chooser:
    """Calls the kernel on logits of the host."""

    def __init__(self, vocab: int) -> None:
        scratch = {
            "maxima": cupy.zeros(-(-vocab // 64), cupy.uint32),
            "counters": cupy.zeros(1, cupy.uint32),
        }
        self.ops = CudaOps(scratch)
        self.token, self.position, self.chosen = (cupy.zeros(1, cupy.int32) for _ in range(3))

    def __call__(self, logits: np.ndarray, options: SamplerOptions, position: int) -> int:
        sampling = sampling_of(options)
        assert sampling is not None
        self.position.fill(position - 1)
        on_device, how = cupy.asarray(logits[None]), cupy.asarray(sampling)
        self.ops.sample(on_device, how, self.token, self.position, self.chosen)
        assert int(self.position[0]) == position
        chosen = int(self.chosen[0])
        assert int(self.token[0]) == max(chosen, 0)
        return chosen


@pytest.mark.parametrize("vocab", [64, 100, 512, 1000, 49152, 151_936])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_the_definitions_token(vocab: int, options: SamplerOptions) -> None:
    rng = np.random.default_rng(vocab)
    choose, sampler = Chooser(vocab), Sampler(options)
    for position in range(1, 61):
        logits = (rng.standard_normal(vocab) * (1 + position % 5)).astype(np.float32)
        if position % 3 == 0:
            logits = np.round(logits * 50) / np.float32(50)  # ties, and zeros of both signs
        if position % 4 == 0:
            logits[rng.random(vocab) < 0.3] = -np.inf
        assert choose(logits, options, position) == sampler(logits, position)


def test_what_the_kernel_leaves_to_the_host() -> None:
    vocab, options = 5000, OPTIONS[1]
    choose = Chooser(vocab)
    logits = np.zeros(vocab, np.float32)
    assert choose(logits, options, 9) == TOO_MANY
    logits[77] = 1
    assert choose(logits, SamplerOptions(), 9) == 77
    logits = np.random.default_rng(0).standard_normal(vocab).astype(np.float32)
    for wrong in (np.nan, -np.nan, np.inf):
        logits[77] = wrong
        assert choose(logits, options, 9) == NOT_FINITE
    assert choose(np.full(64, -np.inf, np.float32), options, 9) == NOT_FINITE
    for refused in (SamplerOptions(temperature=1.0), SamplerOptions(temperature=1.0, top_k=65)):
        assert sampling_of(refused) is None
