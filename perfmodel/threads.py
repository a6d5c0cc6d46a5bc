"""Work on a pool of threads whose results do not depend on how many there are."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_AHEAD_PER_WORKER = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int | None
) -> Generator[Result, None, None]:
    """Yield the result of each item, in the order of the items.

    Threads work a few items ahead of what was taken, so memory is bounded. Closing the generator
    waits for the items in work and drops the rest.

    Parameters
    ----------
    work : callable
        What to do with an item; it gains from threads where it holds no interpreter lock. What it
        raises is raised where its result is due.
    items : iterable
    workers : int or None
        Threads, at least 1, or None for all cores; one worker is the caller's own thread, item by
        item.
    """
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="mosaic")
    try:
        for item in items:
            if len(waiting) >= _AHEAD_PER_WORKER * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
