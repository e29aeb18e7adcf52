"""What is kept of a request."""

from __future__ import annotations

import logging

import pytest

from shoal.core.recording import RequestLog
from shoal.http.access_log import MAX_PATH, log_request, record_request
from shoal.http.request import Request


def test_a_caller_does_not_choose_the_size_of_records(caplog: pytest.LogCaptureFixture) -> None:
    """A path may be as long as a request's head."""
    request = Request({"method": "GET", "path": "/" + "x" * 65_000, "headers": [], "query_string": b""}, 0.0)
    log = RequestLog(1)
    with caplog.at_level(logging.INFO, logger="shoal.access"):
        log_request(request, 404, quiet=False)
    record_request(log, request, 404, None)
    (logged,) = [each for each in caplog.records if each.name == "shoal.access"]
    assert log.requests[0].path == logged.__dict__["path"] == request.path[:MAX_PATH]
    assert len(logged.getMessage()) < 2 * MAX_PATH
