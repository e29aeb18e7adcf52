"""Work that is done once in a process, whichever thread comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps


def once(work: Callable[[], None]) -> Callable[[], None]:
    """`work` runs in the first thread that calls it, and every other call waits for its end.

    What it raises reaches its caller, and the next call tries again.
    """
    lock = threading.Lock()
    done = False

    @wraps(work)
    def run() -> None:
        nonlocal done
        if done:
            return
        with lock:
            if not done:
                work()
                done = True

    return run
