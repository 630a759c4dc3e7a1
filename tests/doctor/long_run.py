"""The plan's invariants on as many plans as wanted: ``python -m tests.doctor.long_run --plans 1000000``.

Each property gets a new generator again and again, seeded by a running number; the seed of one that fails is printed.
Ctrl-C, or SIGTERM, ends it after the seed that it is at, with the count that ends every run.
"""

from __future__ import annotations

import argparse
import signal
import time
from itertools import count
from random import Random

import tests.doctor.test_invariants  # noqa: F401  declares the properties
from tests.doctor.questions import PROPERTIES, Counter

_SAY_EVERY = 60  # seconds


def main() -> None:
    """Ask until enough plans were made or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--first-seed", type=int, default=0)
    wanted = parser.parse_args()
    asked_to_stop: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: asked_to_stop.append(number))
    start = said = time.monotonic()
    for seed in count(wanted.first_seed):
        for holds in PROPERTIES:
            try:
                holds(Random(seed))
            except BaseException:
                print(f"{holds.__name__} stopped at seed {seed}", flush=True)
                raise
        now = time.monotonic()
        enough = Counter.plans >= wanted.plans or now - start >= 60 * wanted.minutes
        done = enough or bool(asked_to_stop)
        if done or now - said >= _SAY_EVERY:
            said = now
            print(
                f"{Counter.plans:,} plans ({Counter.feasible:,} of them fit), seeds {wanted.first_seed} to {seed}, "
                f"{(now - start) / 60:.1f} min",
                flush=True,
            )
        if done:
            return


if __name__ == "__main__":
    main()
