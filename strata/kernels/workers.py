"""Threads for the numpy backend, so that BLAS itself can stay on one thread.

BLAS splits a product by the number of its threads, and with the split its rounding changes. Here the pieces are
the caller's and depend on shapes only; threads merely share them out, so their number never changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from threadpoolctl import threadpool_limits

WORTH_A_THREAD = 1 << 20  # multiplications; a sleeping thread takes some 100 us to wake

Task: TypeAlias = Callable[[int], None]  # takes the number of the worker that runs it, for its own scratch


class Workers:
    """`threads` workers, the calling thread being number 0. Making one limits BLAS to one thread in this process."""

    def __init__(self, threads: int) -> None:
        threadpool_limits(1, user_api="blas")  # type: ignore[no-untyped-call]
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "strata") if threads > 1 else None

    def run(self, tasks: Sequence[Task], multiplications: int) -> None:
        """Run all tasks, in any order and place, and return when the last has ended.

        `multiplications`, of all of them together, says whether waking a thread is worth its while.
        """
        queue = iter(tasks)

        def drain(worker: int) -> None:
            for task in queue:
                task(worker)

        helpers = range(1, min(self.threads, len(tasks))) if multiplications >= WORTH_A_THREAD else ()
        futures = [self._pool.submit(drain, worker) for worker in helpers] if self._pool else []
        try:
            drain(0)
        finally:
            for future in futures:
                future.result()
