"""Logs: the two formats, what may leave, and what happens to uvicorn's."""

from __future__ import annotations

import io
import json
import logging
import threading
from typing import Any

import pytest

from shoal.observability import logs
from shoal.observability.logs import Format, configure


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO, format: Format = "auto", level: str = "info", **settings: Any) -> list[str]:
    """Lines that one ordinary, one access, one debug and one library record leave."""
    with configure(level, format, stream=stream, environ=settings.pop("environ", {}), **settings):
        logging.getLogger("shoal.core").info("model %s is ready", "m")
        extra = {"method": "POST", "path": "/embed", "status": 200, "ms": 3.14159, "request_id": "r1", "tokens": 16}
        logging.getLogger("shoal.access").info("request", extra=extra)
        logging.getLogger("shoal.core").debug("detail")
        logging.getLogger("elsewhere").info("noise")
    return stream.getvalue().splitlines()


def test_json_where_there_is_no_terminal() -> None:
    """Each line is one JSON object with time, level, logger, message and the record's fields."""
    ready, access = (json.loads(line) for line in written(io.StringIO()))
    assert ready["message"] == "model m is ready"
    assert ready["level"] == "info"
    assert ready["logger"] == "shoal.core"
    assert ready["time"].endswith("+00:00")
    assert access["status"] == 200
    assert access["request_id"] == "r1"
    assert "model" not in access


def test_colour_on_a_terminal_and_none_with_no_color() -> None:
    """A terminal gets coloured text; NO_COLOR takes the colours, not the text."""
    coloured = written(Terminal())
    plain = written(Terminal(), environ={"NO_COLOR": "1"})
    assert "\x1b[" in coloured[0]
    assert "\x1b" not in "".join(plain)
    assert "model m is ready" in plain[0]
    assert "POST /embed 200" in plain[1]
    assert "ms=3.1 " in plain[1]


def test_a_line_about_no_batch_does_not_speak_of_one() -> None:
    """The text of a probe's access line leaves out what is nought; the JSON keeps it."""
    extra = {"method": "GET", "path": "/health", "status": 200, "items": 0, "batch_size": 0, "queue_ms": 0.0}
    text, machine = Terminal(), io.StringIO()
    for stream in (text, machine):
        with configure(stream=stream, environ={"NO_COLOR": "1"}):
            logging.getLogger("shoal.access").info("request", extra=extra)
    assert text.getvalue().endswith("GET /health 200\n")
    assert json.loads(machine.getvalue())["items"] == 0


def test_text_can_be_had_without_a_terminal() -> None:
    """`text` into a file is text without colours."""
    lines = written(io.StringIO(), "text")
    assert "\x1b" not in lines[0]
    assert "request_id=r1" in lines[1]


def test_the_level_is_for_shoal_and_libraries_keep_to_warnings() -> None:
    """`debug` adds Shoal's debug records and nobody else's info."""
    lines = written(io.StringIO(), level="debug")
    assert [json.loads(line)["message"] for line in lines] == ["model m is ready", "request", "detail"]


def test_the_access_log_can_be_switched_off() -> None:
    """Without it the other records stay."""
    assert len(written(io.StringIO(), access=False)) == 1


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    """The message says what may be written instead."""
    with (
        pytest.raises(ValueError, match="use one of debug, info"),
        configure("loud", stream=io.StringIO()),
    ):
        pytest.fail("it was taken")


@pytest.mark.parametrize("format", ["text", "json"])
def test_inputs_and_keys_do_not_leave(format: Format) -> None:
    """An attribute that is no known field is dropped; tokens in messages and fields are masked."""
    stream = io.StringIO()
    with configure(format=format, stream=stream):
        extra = {"body": "SECRET-INPUT", "path": "/x Bearer SECRET-PATH"}
        logging.getLogger("shoal").warning("got Authorization: Bearer SECRET-KEY and hf_SECRETHUB", extra=extra)
    assert "SECRET" not in stream.getvalue()
    assert "***" in stream.getvalue()


def test_a_path_cannot_forge_a_line_or_steer_the_terminal() -> None:
    """Control characters that a client sends are shown, not obeyed."""
    stream = Terminal()
    with configure(stream=stream, environ={"NO_COLOR": "1"}):
        extra = {"method": "GET", "path": "/\n12:00 INFO forged\x1b[2J\u2028", "status": 404}
        logging.getLogger("shoal.access").info("request", extra=extra)
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_error_keeps_its_traceback(format: Format) -> None:
    """`exception` shows where it came from."""
    stream = io.StringIO()
    with configure(format=format, stream=stream):
        try:
            raise KeyError("cause")
        except KeyError:
            logging.getLogger("shoal").exception("it broke")
    assert "Traceback" in stream.getvalue()
    assert "KeyError" in stream.getvalue()


def test_uvicorn_is_folded_in_and_its_access_line_is_not() -> None:
    """uvicorn's errors come out in Shoal's format; its access log stays silent."""
    stream = io.StringIO()
    with configure(stream=stream):
        logging.getLogger("uvicorn.error").info("Started")
        logging.getLogger("uvicorn.access").info("GET /")
    assert [json.loads(line)["logger"] for line in stream.getvalue().splitlines()] == ["uvicorn.error"]


def test_the_caller_never_writes() -> None:
    """Formatting and writing happen in a thread of their own, so that a slow terminal cannot stall the loop."""
    writers: set[int] = set()

    class Watching(io.StringIO):
        def write(self, text: str) -> int:
            writers.add(threading.get_ident())
            return super().write(text)

    stream = Watching()
    with configure(stream=stream):
        logging.getLogger("shoal").info("hello")
    assert "hello" in stream.getvalue()
    assert threading.get_ident() not in writers


def test_a_record_that_cannot_be_formatted_costs_only_itself() -> None:
    """A call with the wrong arguments leaves a line that says so, and the next record comes out."""
    stream = io.StringIO()
    with configure(stream=stream):
        logging.getLogger("shoal").info("%d things", "many")
        logging.getLogger("shoal").info("still here")
    first, second = stream.getvalue().splitlines()
    assert "could not be formatted" in first
    assert json.loads(second)["message"] == "still here"


def test_a_stream_that_is_gone_stops_nothing() -> None:
    """Writing to a closed pipe is given up quietly; closing still ends."""
    stream = io.StringIO()
    with configure(stream=stream):
        stream.close()
        logging.getLogger("shoal").info("nobody reads this")
    assert "logs" not in {thread.name for thread in threading.enumerate()}


def test_many_records_come_out_in_order() -> None:
    """Nothing is lost or reordered between the callers and the writing thread."""
    stream = io.StringIO()
    with configure(stream=stream):
        for number in range(1000):
            logging.getLogger("shoal").info("%d", number)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [str(n) for n in range(1000)]


def test_closing_puts_the_loggers_back() -> None:
    """On leaving, the root has the handlers that it had before."""
    root = logging.getLogger()
    before, threads = list(root.handlers), logging.logThreads
    with configure(stream=io.StringIO()):
        assert root.handlers != before
    assert root.handlers == before
    assert logging.logThreads is threads


def test_every_field_is_named_once() -> None:
    """The list of what may leave has no duplicates."""
    assert len(set(logs.FIELDS)) == len(logs.FIELDS)
