"""How much a piece of code works, told without a clock: what a busy or slow machine cannot change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(work: Callable[[], Any]) -> int:
    """Run `work` and count the lines of Python that ran, each round of a loop or comprehension anew. Work within a
    library's C code does not count."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
