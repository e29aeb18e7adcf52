"""The access log: one record per request, at minimal cost to the event loop.

A `logging` record looks up threads, processes, files and tasks that no format here uses, and a caller formats its text.
This record is a copy of a template, and the log writer formats its text.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from shoal.core.recording import RequestLog, RequestRecord, RequestSpan
from shoal.http.request import Request

_log = logging.getLogger("shoal.access")

_TEMPLATES = {
    level: vars(logging.LogRecord(_log.name, level, "", 0, "%s %s %d %.1f ms%s", (), None))
    for level in (logging.DEBUG, logging.INFO)
}
_EPOCH = _TEMPLATES[logging.INFO]["created"] - _TEMPLATES[logging.INFO]["relativeCreated"] / 1000


MAX_PATH = 512
"""Characters of a path that are kept: a client may send one of 64 KB."""


class AccessRecord(logging.LogRecord):
    """A record with all attributes of LogRecord, plus those of `FIELDS` in shoal.observability.logs."""

    def __init__(self, level: int, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        # The base's __init__ only sets what the template holds. A formatter reads `__dict__`.
        values = self.__dict__ = _TEMPLATES[level] | fields
        values["args"] = args
        values["created"] = created = time.time()
        values["msecs"] = created % 1 * 1000
        values["relativeCreated"] = (created - _EPOCH) * 1000


def log_request(request: Request, status: int, *, quiet: bool) -> None:
    """Log a request answered with `status`, at DEBUG level if `quiet`, else at INFO level."""
    level = logging.DEBUG if quiet else logging.INFO
    if not _log.isEnabledFor(level):
        return
    elapsed = (time.monotonic() - request.started) * 1000
    fields = {
        "method": request.method,
        "path": request.path[:MAX_PATH],
        "status": status,
        "ms": round(elapsed, 3),
        "model": request.model,
        "items": request.items,
        "tokens": 0,
        "completion_tokens": 0,
        "batch_size": 0,
        "queue_ms": 0.0,
        "replica": "",
        "request_id": request.id,
        "client": request.client,
    }
    if request.result is not None:
        facts = request.result.facts
        fields["tokens"] = sum(request.result.tokens)
        fields["batch_size"], fields["queue_ms"] = facts.size, round(facts.queue_ms, 3)
        fields["replica"] = facts.replica
    if request.usage is not None:  # unknown for a stream that was cut off
        fields["completion_tokens"] = request.usage.completion_tokens
        fields["tokens"] = request.usage.prompt_tokens + request.usage.completion_tokens
    failed = ""
    if request.failure:
        failed, fields["kind"] = f" and failed: {request.failure}", request.failure
    _log.handle(AccessRecord(level, (request.method, fields["path"], status, elapsed, failed), fields))


def record_request(log: RequestLog, request: Request, status: int, span: RequestSpan | None) -> None:
    """Keep what happened to a request, and end its span. One that another process answers is kept there."""
    record = RequestRecord(
        request.id,
        request.surface,
        request.method,
        request.path[:MAX_PATH],
        status,
        time.time(),
        request.started,
        time.monotonic() - request.started,
        request.client,
        request.model,
        request.failure or request.error,
    )
    if not request.is_forwarded:
        log.requests.append(record)
    if span is not None:
        span.end(record)
