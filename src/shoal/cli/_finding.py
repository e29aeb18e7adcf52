"""What `shoal doctor` finds, and how a finding is shown."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warn", "fail"]

COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
NAME_WIDTH = 12
_INDENT = 6 + NAME_WIDTH


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` is what to do next, for everything that is not ok."""

    name: str
    state: State
    text: str
    advice: str = ""

    def lines(self, width: int) -> list[str]:
        """Return the finding without its state, in lines of at most `width` columns; long words stay whole."""
        room = max(width - _INDENT, 30)
        rows = textwrap.wrap(self.text, room, break_long_words=False, break_on_hyphens=False) or [""]
        rows += textwrap.wrap(f"-> {self.advice}", room, break_long_words=False, break_on_hyphens=False) * bool(
            self.advice
        )
        return [f"{self.name:<{NAME_WIDTH}}{rows[0]}", *(" " * _INDENT + row for row in rows[1:])]
