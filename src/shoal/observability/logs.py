"""Logs: one line per event, colored on a terminal, JSON elsewhere, written by a separate thread.

Of a record only the message and the fields in FIELDS are written, so that an input or a key attached by mistake does
not leak; bearer tokens in messages are masked.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import Any, Literal, TextIO

import orjson

Format = Literal["auto", "text", "json"]

ACCESS = "shoal.access"
"""The logger with one line per request; its records have FIELDS as extra attributes."""

FIELDS = (
    *("method", "path", "status", "ms", "model", "items", "tokens"),
    *("completion_tokens", "batch_size", "queue_ms"),
    *("replica", "client", "kind", "request_id"),
)

FLUSH_INTERVAL_S = 0.02
"""Seconds that records are collected before writing: waking a thread for every line costs the event loop more than the
line itself."""

_CHUNK = 32  # lines formatted per step, about 0.3 ms, so that the event loop gets the GIL back
_MAX_PENDING = 100_000  # records kept while a terminal or pipe is stalled; then the oldest are dropped
_MARKS = ("bearer", "hf_", "sk-")
_SECRETS = re.compile(r"(?i)(bearer\s+|\bhf_|\bsk-)[\w.~+/=-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_COLORS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


@contextmanager
def configure(
    level: str = "info",
    format: Format = "auto",
    *,
    access: bool = True,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[bool]:
    """Inside the block, send all records to `stream` (default: standard error): Shoal's and uvicorn's from `level`,
    warnings of other libraries. Yields whether they are JSON. On exit, write pending records and restore the loggers.

    `format` "auto" means text on a terminal and JSON elsewhere; NO_COLOR disables colors. `access` False disables the
    access log. Run uvicorn with `log_config=None`, else it configures logging. Raises ValueError for an unknown level.
    """
    out = sys.stderr if stream is None else stream
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        known = ", ".join(name.lower() for name in _COLORS)
        raise ValueError(f"unknown log level {level!r}: use one of {known}")
    terminal = out.isatty()
    as_text = format == "text" or (format == "auto" and terminal)
    colour = terminal and not (os.environ if environ is None else environ).get("NO_COLOR")

    writer = _Writer(out, TextFormatter(colour=colour) if as_text else JsonFormatter())
    levels = {
        "": logging.WARNING,
        "shoal": number,
        ACCESS: logging.NOTSET if access else logging.CRITICAL,
        "uvicorn": number,
        "uvicorn.error": logging.NOTSET,
        "uvicorn.asgi": logging.NOTSET,
        # uvicorn's access log has neither model nor batch: Shoal's replaces it
        "uvicorn.access": logging.CRITICAL,
    }
    loggers = {name: logging.getLogger(name) for name in levels}
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers.values()]
    forwarder = _RecordForwarder(writer)
    for name, logger in loggers.items():
        logger.handlers[:] = [forwarder] if name in ("", ACCESS) else []
        logger.setLevel(levels[name])
        logger.propagate = name != ACCESS  # the way through two parents costs as much as the record
    # records skip lookups of values that no format shows (the documented way to make logging cheaper)
    unwanted = {"logThreads": False, "logProcesses": False, "logMultiprocessing": False, "_srcfile": None}
    records = {name: getattr(logging, name) for name in unwanted}
    for name, nothing in unwanted.items():
        setattr(logging, name, nothing)
    try:
        yield not as_text
    finally:
        for logger, handlers, number, propagate in before:
            logger.handlers[:] = handlers
            logger.setLevel(number)
            logger.propagate = propagate
        for name, value in records.items():
            setattr(logging, name, value)
        writer.close()


class _RecordForwarder(logging.Handler):
    """Passes records unformatted to the writer thread, which formats them."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.add(record)


class _Writer:
    """A thread that formats and writes the records passed to `add`; `close` returns when all are written."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        self._stream = stream
        self._formatter = formatter
        self._records: deque[logging.LogRecord] = deque(maxlen=_MAX_PENDING)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def add(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not (self._closing.is_set() and not self._records):
            self._wake.wait()
            self._closing.wait(FLUSH_INTERVAL_S)
            self._wake.clear()
            while self._records:
                self._write([self._records.popleft() for _ in range(min(_CHUNK, len(self._records)))])

    def _write(self, records: list[logging.LogRecord]) -> None:
        try:
            self._stream.write("".join(self._line(record) for record in records))
            self._stream.flush()
        except (OSError, ValueError):  # the terminal or the pipe is closed, so the error cannot be reported
            pass

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self._formatter.format(record) + "\n"
        except Exception as error:  # a call with wrong arguments loses only its own line
            return f"{record.levelname.lower()} {record.name}: a record could not be formatted: {error!r}\n"


@lru_cache(maxsize=2)
def _format_second(second: int, zone: tzinfo | None, form: str) -> str:
    """Format a time. Many lines share a second."""
    return datetime.fromtimestamp(second, zone).strftime(form)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the FIELDS of the record, error."""

    def format(self, record: logging.LogRecord) -> str:
        second, part = divmod(record.created, 1)
        entry: dict[str, Any] = {
            "time": f"{_format_second(int(second), UTC, '%Y-%m-%dT%H:%M:%S')}.{int(part * 1000):03d}+00:00",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return _mask_secrets(orjson.dumps(entry, default=str).decode())


class TextFormatter(logging.Formatter):
    """A human-readable line; control characters are escaped, so client input cannot start a new line or control the
    terminal."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        second, part = divmod(record.created, 1)
        time = f"{_format_second(int(second), None, '%H:%M:%S')}.{int(part * 1000):03d}"
        level = self._paint(_COLORS.get(record.levelname, "0"), f"{record.levelname.lower():<8}")
        fields = _fields(record)
        if record.name == ACCESS:
            message = " ".join(str(fields.pop(name, "-")) for name in ("method", "path", "status"))
            fields = {name: value for name, value in fields.items() if value}  # a page or a probe has no batch
        else:
            message = record.getMessage()
        shown = " ".join(f"{name}={_format_value(value)}" for name, value in fields.items())
        line = f"{self._paint('2', time)} {level} {escape_control(message)}"
        if shown:
            line += "  " + self._paint("2", escape_control(shown))
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info).replace("\x1b", "\\x1b")
        return _mask_secrets(line)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = record.__dict__
    return {name: own[name] for name in FIELDS if own.get(name) is not None}


def _format_value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _mask_secrets(text: str) -> str:
    lowered = text.lower()
    return _SECRETS.sub(r"\1***", text) if any(mark in lowered for mark in _MARKS) else text


def escape_control(text: str) -> str:
    """Escape what could start a line, or move a terminal's cursor: clients choose paths and ids that servers repeat."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
