"""Threads for the numpy backend, so that BLAS itself can stay on one thread.

BLAS splits a product by the number of its threads, and with the split its rounding changes. Here the pieces are
the caller's and depend on shapes only; threads merely share them out, so their number never changes a bit.

A decode step asks for a hundred small rounds of work, so a round costs one message to each helper and one back:
`concurrent.futures` takes several times as long.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from threadpoolctl import threadpool_limits

WORTH_A_THREAD = 1 << 20  # multiplications; a sleeping thread takes up to 100 us to wake

Task: TypeAlias = Callable[[int], None]  # takes the number of the worker that runs it, for its own scratch


class _Round:
    """Tasks to be shared out; every helper that took part reports by `ended`."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = iter(tasks)
        self.ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self, worker: int) -> None:
        """Run tasks until none is left. Taking one from the iterator is a single step of the interpreter."""
        for task in self._tasks:
            task(worker)

    def cancel(self) -> None:
        """Begin no further task."""
        for _ in self._tasks:
            continue


_Inbox: TypeAlias = "SimpleQueue[_Round | None]"


class Workers:
    """`threads` workers, the calling thread being number 0. Making one limits BLAS to one thread in this process."""

    def __init__(self, threads: int) -> None:
        threadpool_limits(1, user_api="blas")  # type: ignore[no-untyped-call]
        self.threads = threads
        self._inboxes: list[_Inbox] = [SimpleQueue() for _ in range(threads - 1)]
        for worker, inbox in enumerate(self._inboxes, 1):
            threading.Thread(target=_help, args=(worker, inbox), name=f"strata-{worker}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, tasks: Sequence[Task], multiplications: int) -> None:
        """Run all tasks, in any order and place, and return when the last has ended, also when one fails.

        Parameters
        ----------
        tasks : sequence of Task
        multiplications : int
            Of all of them together: says whether waking a thread is worth its while.

        Raises
        ------
        BaseException
            The first that a task raised; those that had not begun are left out. Also Ctrl-C's `KeyboardInterrupt`.
            No task is running any more by then: the caller may free what they write to.
        """
        inboxes = self._inboxes[: len(tasks) - 1] if multiplications >= WORTH_A_THREAD else ()
        shared = _Round(tasks)
        try:
            for inbox in inboxes:
                inbox.put(shared)
            shared.work(0)
            for _ in inboxes:
                if error := shared.ended.get():
                    raise error
        except BaseException:
            shared.cancel()
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait until every helper is idle; a further Ctrl-C changes nothing about that.

        Helpers work off their inboxes in order, so one that answers a new, empty round has ended all earlier ones.
        """
        while True:
            try:
                empty = _Round(())
                for inbox in self._inboxes:
                    inbox.put(empty)
                for _ in self._inboxes:
                    empty.ended.get()
            except KeyboardInterrupt:
                continue
            return


def _help(worker: int, inbox: _Inbox) -> None:
    """Work off the rounds of an inbox until a None."""
    while (shared := inbox.get()) is not None:
        try:
            shared.work(worker)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that shared the round out
            shared.cancel()
            shared.ended.put(error)
        else:
            shared.ended.put(None)
        del shared  # a round holds arrays; an idle helper holds none


def _dismiss(inboxes: Sequence[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
