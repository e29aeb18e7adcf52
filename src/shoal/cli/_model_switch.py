"""The models that a chat can talk to: one is open at a time, and the user can switch to another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cli._talking import ChatSource
from shoal.errors import SetupError


class ModelSwitch:
    """Opens models of a chat. `open_chat` opens one by name, into the stack that closes it; `list_names` lists what can
    be opened. Both raise ShoalErrors.

    The next model opens before the last one closes, so that a name that cannot be opened costs nothing.
    """

    def __init__(
        self,
        open_chat: Callable[[contextlib.ExitStack, str], ChatSource],
        list_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.list_names = list_names
        self._open_chat = open_chat
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ModelSwitch:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def open(self, name: str) -> ChatSource:
        with contextlib.ExitStack() as stack:
            opened = self._open_chat(stack, name)
            last, self._stack = self._stack, stack.pop_all()
        last.close()
        return opened


def check_listed(name: str, names: Sequence[str]) -> None:
    """Raise SetupError for a name that is not among `names`."""
    from difflib import get_close_matches

    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "/model lists them, and an address (hf:org/name) works too"
        raise SetupError(f"{name} is none of the models here: {hint}")
