"""Logs: both formats, redaction, and uvicorn's loggers."""

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
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def log_lines(stream: io.StringIO, format: Format = "auto", level: str = "info", **settings: Any) -> list[str]:
    """Return the lines of an ordinary, an access, a debug and a library record."""
    with configure(level, format, stream=stream, environ=settings.pop("environ", {}), **settings):
        logging.getLogger("shoal.core").info("model %s is ready", "m")
        extra = {"method": "POST", "path": "/embed", "status": 200, "ms": 3.14159, "request_id": "r1", "tokens": 16}
        logging.getLogger("shoal.access").info("request", extra=extra)
        logging.getLogger("shoal.core").debug("detail")
        logging.getLogger("elsewhere").info("noise")
    return stream.getvalue().splitlines()


def test_json_without_a_terminal() -> None:
    """Each line is one JSON object with time, level, logger, message and the record's fields."""
    ready, access = (json.loads(line) for line in log_lines(io.StringIO()))
    assert ready["message"] == "model m is ready"
    assert ready["level"] == "info"
    assert ready["logger"] == "shoal.core"
    assert ready["time"].endswith("+00:00")
    assert access["status"] == 200
    assert access["request_id"] == "r1"
    assert "model" not in access


def test_color_on_a_terminal_unless_no_color() -> None:
    """A terminal gets colored text; NO_COLOR removes only the colors."""
    coloured = log_lines(Terminal())
    plain = log_lines(Terminal(), environ={"NO_COLOR": "1"})
    assert "\x1b[" in coloured[0]
    assert "\x1b" not in "".join(plain)
    assert "model m is ready" in plain[0]
    assert "POST /embed 200" in plain[1]
    assert "ms=3.1 " in plain[1]


def test_an_access_line_without_a_batch_omits_its_fields() -> None:
    """The text of a probe's access line omits zeros; JSON has them."""
    extra = {"method": "GET", "path": "/health", "status": 200, "items": 0, "batch_size": 0, "queue_ms": 0.0}
    text, machine = Terminal(), io.StringIO()
    for stream in (text, machine):
        with configure(stream=stream, environ={"NO_COLOR": "1"}):
            logging.getLogger("shoal.access").info("request", extra=extra)
    assert text.getvalue().endswith("GET /health 200\n")
    assert json.loads(machine.getvalue())["items"] == 0


def test_text_format_without_a_terminal() -> None:
    """`text` into a file has no colors."""
    lines = log_lines(io.StringIO(), "text")
    assert "\x1b" not in lines[0]
    assert "request_id=r1" in lines[1]


def test_the_level_applies_to_shoal_only() -> None:
    """`debug` adds Shoal's debug records only."""
    lines = log_lines(io.StringIO(), level="debug")
    assert [json.loads(line)["message"] for line in lines] == ["model m is ready", "request", "detail"]


def test_the_access_log_can_be_switched_off() -> None:
    """All other records stay."""
    assert len(log_lines(io.StringIO(), access=False)) == 1


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    """The message lists the levels."""
    with (
        pytest.raises(ValueError, match="use one of debug, info"),
        configure("loud", stream=io.StringIO()),
    ):
        pytest.fail("it was taken")


@pytest.mark.parametrize("format", ["text", "json"])
def test_inputs_and_keys_are_not_logged(format: Format) -> None:
    """Unknown attributes are dropped; tokens in messages and fields are masked."""
    stream = io.StringIO()
    with configure(format=format, stream=stream):
        extra = {"body": "SECRET-INPUT", "path": "/x Bearer SECRET-PATH"}
        logging.getLogger("shoal").warning("got Authorization: Bearer SECRET-KEY and hf_SECRETHUB", extra=extra)
    assert "SECRET" not in stream.getvalue()
    assert "***" in stream.getvalue()


def test_a_path_cannot_forge_a_line_or_steer_the_terminal() -> None:
    """Control characters from a client are escaped."""
    stream = Terminal()
    with configure(stream=stream, environ={"NO_COLOR": "1"}):
        extra = {"method": "GET", "path": "/\n12:00 INFO forged\x1b[2J\u2028", "status": 404}
        logging.getLogger("shoal.access").info("request", extra=extra)
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_error_keeps_its_traceback(format: Format) -> None:
    """`exception` contains the traceback."""
    stream = io.StringIO()
    with configure(format=format, stream=stream):
        try:
            raise KeyError("cause")
        except KeyError:
            logging.getLogger("shoal").exception("it broke")
    assert "Traceback" in stream.getvalue()
    assert "KeyError" in stream.getvalue()


def test_uvicorn_errors_are_logged_but_not_its_access_lines() -> None:
    """uvicorn's errors use Shoal's format; its access log stays silent."""
    stream = io.StringIO()
    with configure(stream=stream):
        logging.getLogger("uvicorn.error").info("Started")
        logging.getLogger("uvicorn.access").info("GET /")
    assert [json.loads(line)["logger"] for line in stream.getvalue().splitlines()] == ["uvicorn.error"]


def test_records_are_written_in_a_thread() -> None:
    """A separate thread formats and writes, so a slow terminal cannot block the loop."""
    writers: set[int] = set()

    class ThreadRecorder(io.StringIO):
        def write(self, text: str) -> int:
            writers.add(threading.get_ident())
            return super().write(text)

    stream = ThreadRecorder()
    with configure(stream=stream):
        logging.getLogger("shoal").info("hello")
    assert "hello" in stream.getvalue()
    assert threading.get_ident() not in writers


def test_an_invalid_record_does_not_affect_others() -> None:
    """A call with wrong arguments logs an error line, and the next record is written."""
    stream = io.StringIO()
    with configure(stream=stream):
        logging.getLogger("shoal").info("%d things", "many")
        logging.getLogger("shoal").info("still here")
    first, second = stream.getvalue().splitlines()
    assert "could not be formatted" in first
    assert json.loads(second)["message"] == "still here"


def test_a_closed_stream_is_ignored() -> None:
    """Errors of a closed pipe are ignored; closing still completes."""
    stream = io.StringIO()
    with configure(stream=stream):
        stream.close()
        logging.getLogger("shoal").info("nobody reads this")
    assert "logs" not in {thread.name for thread in threading.enumerate()}


def test_records_stay_in_order() -> None:
    """No record is lost or reordered on the way to the writer thread."""
    stream = io.StringIO()
    with configure(stream=stream):
        for number in range(1000):
            logging.getLogger("shoal").info("%d", number)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [str(n) for n in range(1000)]


def test_closing_restores_the_loggers() -> None:
    """On exit the root logger has its previous handlers."""
    root = logging.getLogger()
    before, threads = list(root.handlers), logging.logThreads
    with configure(stream=io.StringIO()):
        assert root.handlers != before
    assert root.handlers == before
    assert logging.logThreads is threads


def test_every_field_is_named_once() -> None:
    """The allow-list has no duplicates."""
    assert len(set(logs.FIELDS)) == len(logs.FIELDS)
