"""Map the input index in an error message when a request ran in parts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.errors import InputRejected, NotFinite, ShoalError

_INPUT_PREFIX = re.compile(r"input ([0-9]+): ")


def parse_input_index(error: ShoalError) -> tuple[int | None, str]:
    """Return the input index in the message, as `ShoalError.at_input` writes it, and the message without it."""
    named = _INPUT_PREFIX.match(error.message)
    return (int(named[1]), error.message[named.end() :]) if named is not None else (None, error.message)


def remap_input_error(error: ShoalError, places: Sequence[int]) -> ShoalError:
    """Turn the error of a part that held the inputs at `places` into an error of the whole request."""
    place, message = parse_input_index(error)
    if place is None and (len(places) > 1 or not (error.param == "input" or _is_input_error(error))):
        return error
    return error.with_message(message).at_input(places[place or 0])


def _is_input_error(error: ShoalError) -> bool:
    return isinstance(error, InputRejected | NotFinite)
