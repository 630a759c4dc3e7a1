"""A short generation on the GPU, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.runtime.cuda.short_generation

A prompt of 11 tokens (calls of 8 and of 3), steps whose logits come to the host, and steps whose tokens the device
chooses; with all experts in VRAM, and with two slots.
"""

from __future__ import annotations

import sys

import numpy as np

from strata.gguf.reader import open_gguf
from strata.runtime.engine import Engine
from strata.runtime.sampler import Sampler, SamplerOptions

from .machine import GOLDEN, planned


def main(names: list[str]) -> None:
    """Run each golden model of these names."""
    sampler = Sampler(SamplerOptions(temperature=0.8, top_k=40, seed=1))
    for name in names:
        with open_gguf(GOLDEN / f"{name}.gguf") as file:
            for options in ({}, {"expert_cache": 2}):
                with Engine.load(file, planned(file, max_context=64, **options)) as engine:
                    for token in range(4):
                        assert np.isfinite(engine.decode(token)).all()
                    engine.resume([99])
                    answer = list(engine.generate(list(range(11)), sampler, max_tokens=8))
                    print(name, options, answer)


if __name__ == "__main__":
    main(sys.argv[1:] or ["qwen3moe-Q4_K", "llama"])
