"""Errors of a part of a request, converted to errors of the whole request."""

from __future__ import annotations

import pytest

from shoal.core.input_errors import parse_input_index, remap_input_error
from shoal.errors import InputRejected, InvalidValue, NotFinite, Overloaded, ShoalError


@pytest.mark.parametrize(
    ("error", "places", "message"),
    [
        (InvalidValue("input 1: bad", param="input"), [4, 7], "input 7: bad"),
        (InvalidValue("bad", param="input"), [4], "input 4: bad"),
        (InputRejected("bad"), [4], "input 4: bad"),
        (NotFinite("bad"), [4], "input 4: bad"),
        (InputRejected("bad"), [4, 7], "bad"),
        (InvalidValue("bad", param="dimensions"), [4], "bad"),
        (Overloaded("full", retry_after=2.0), [4], "full"),
    ],
)
def test_the_place_is_that_of_the_whole_request(error: ShoalError, places: list[int], message: str) -> None:
    """The index is that of the input named in the message, or of the only input."""
    found = remap_input_error(error, places)
    assert found.message == str(found) == message
    assert type(found) is type(error)
    assert (found.param, found.retry_after) == (error.param, error.retry_after)


def test_a_message_is_taken_apart() -> None:
    """A message is split into the parts that `at_input` joined."""
    assert parse_input_index(InvalidValue("bad").at_input(12)) == (12, "bad")
    assert parse_input_index(InvalidValue("bad")) == (None, "bad")
