"""Which input of a request an error is about, when inputs were run in parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.errors import InputRejected, NotFinite, ShoalError

_NAMED = re.compile(r"input ([0-9]+): ")


def place_in(error: ShoalError) -> tuple[int | None, str]:
    """The input that its message names, as `ShoalError.of_input` does, and the message without that."""
    named = _NAMED.match(error.message)
    return (int(named[1]), error.message[named.end() :]) if named is not None else (None, error.message)


def placed(error: ShoalError, places: Sequence[int]) -> ShoalError:
    """The error of a part of a request that held the inputs at `places`, as one of the whole request."""
    place, message = place_in(error)
    if place is None and (len(places) > 1 or not (error.param == "input" or _of_an_input(error))):
        return error
    return error.saying(message).of_input(places[place or 0])


def _of_an_input(error: ShoalError) -> bool:
    return isinstance(error, InputRejected | NotFinite)
