"""The only table from error kinds to the status and codes of each dialect."""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.errors import MethodNotAllowed, ModelFailed, ShoalError, Unauthorized, UpstreamRefused


class OpenAIStatus(NamedTuple):
    status: int
    type: str
    code: str | None


class TeiStatus(NamedTuple):
    """A status of TEI. `error_type` None: the original's web framework answers it, in plain text instead of JSON."""

    status: int
    error_type: str | None


class Row(NamedTuple):
    openai: OpenAIStatus
    tei: TeiStatus
    embedding: int


_INVALID = "invalid_request_error"
_BUSY = "service_unavailable_error"
_BACKEND = Row(OpenAIStatus(500, "server_error", None), TeiStatus(424, "Backend"), 500)
_UPSTREAM = Row(OpenAIStatus(502, "upstream_error", None), TeiStatus(502, "Backend"), 502)
# A load failed because something that it needs was missing: not a fault of this server.
_SETUP = Row(OpenAIStatus(424, "server_error", None), TeiStatus(424, "Backend"), 424)
_WRONG_INPUT = TeiStatus(422, "Validation")

TABLE: dict[str, Row] = {
    "invalid": Row(OpenAIStatus(400, _INVALID, None), _WRONG_INPUT, 400),
    "malformed": Row(OpenAIStatus(400, _INVALID, None), TeiStatus(400, None), 400),
    "wrong_type": Row(OpenAIStatus(400, _INVALID, None), TeiStatus(422, None), 400),
    "empty": Row(OpenAIStatus(400, _INVALID, "invalid_value"), TeiStatus(400, "Empty"), 400),
    "too_many": Row(OpenAIStatus(400, _INVALID, "array_above_max_length"), _WRONG_INPUT, 400),
    "too_long": Row(OpenAIStatus(400, _INVALID, "context_length_exceeded"), _WRONG_INPUT, 400),
    "invalid_value": Row(OpenAIStatus(400, _INVALID, "invalid_value"), _WRONG_INPUT, 400),
    "unsupported": Row(OpenAIStatus(400, _INVALID, "unsupported_parameter"), TeiStatus(424, "Backend"), 400),
    "too_large": Row(OpenAIStatus(413, _INVALID, "request_too_large"), TeiStatus(413, None), 413),
    "media_type": Row(OpenAIStatus(415, _INVALID, "unsupported_content_type"), TeiStatus(415, None), 400),
    "unauthorized": Row(OpenAIStatus(401, _INVALID, "invalid_api_key"), TeiStatus(401, None), 401),
    "forbidden": Row(OpenAIStatus(403, "permission_error", None), TeiStatus(403, None), 403),
    "route_not_found": Row(OpenAIStatus(404, _INVALID, "unknown_url"), _WRONG_INPUT._replace(status=404), 404),
    "method_not_allowed": Row(OpenAIStatus(405, _INVALID, None), _WRONG_INPUT._replace(status=405), 405),
    "model_not_found": Row(OpenAIStatus(404, _INVALID, "model_not_found"), TeiStatus(424, "Backend"), 404),
    "not_at_source": Row(OpenAIStatus(404, _INVALID, "model_not_found"), TeiStatus(424, "Backend"), 404),
    "job_not_found": Row(OpenAIStatus(404, _INVALID, "job_not_found"), _WRONG_INPUT._replace(status=404), 404),
    "object_not_found": Row(OpenAIStatus(404, _INVALID, None), _WRONG_INPUT._replace(status=404), 404),
    "conflict": Row(OpenAIStatus(409, _INVALID, "conflict"), _WRONG_INPUT._replace(status=409), 409),
    "unavailable": Row(OpenAIStatus(503, _BUSY, "server_is_overloaded"), TeiStatus(503, "Unhealthy"), 503),
    "overloaded": Row(OpenAIStatus(429, "rate_limit_error", "rate_limit_exceeded"), TeiStatus(429, "Overloaded"), 429),
    "not_ready": Row(OpenAIStatus(503, _BUSY, "model_loading"), TeiStatus(503, "Unhealthy"), 503),
    "model_failed": Row(OpenAIStatus(503, _BUSY, "model_failed"), TeiStatus(503, "Unhealthy"), 503),
    "deadline": Row(OpenAIStatus(504, "timeout_error", None), TeiStatus(504, "Backend"), 504),
    "request_timeout": Row(OpenAIStatus(408, "timeout", None), TeiStatus(408, None), 408),
    # For the log only: the client has disconnected.
    "cancelled": Row(OpenAIStatus(499, _INVALID, None), TeiStatus(499, None), 499),
    "backend": _BACKEND,
    "input_rejected": Row(OpenAIStatus(400, _INVALID, "invalid_value"), _WRONG_INPUT, 400),
    "out_of_memory": _BACKEND,
    # `status` uses the upstream's own status instead if that is an error.
    "upstream": _UPSTREAM,
    "upstream_failed": _UPSTREAM,
    "transport": _UPSTREAM,
    "crashed": _UPSTREAM,
    "not_finite": _BACKEND,
    "setup": _SETUP,
    "config": _SETUP,
    "address": _SETUP,
    "source": _SETUP,
    "model_file": _SETUP,
    "verification": _SETUP,
    "missing_extra": _SETUP,
    "internal": Row(OpenAIStatus(500, "server_error", None), TeiStatus(500, "Backend"), 500),
}


def find_row(error: ShoalError) -> Row:
    return TABLE[error.kind]


def status(error: ShoalError) -> int:
    """Return the status in OpenAI's dialect and in those with the same statuses.

    An upstream's refusal keeps its own status, which tells clients whether to retry even if its body does not follow
    this API, such as a proxy's error page.
    """
    if isinstance(error, UpstreamRefused) and 400 <= error.status < 600:
        return error.status
    return find_row(error).openai.status


_ANTHROPIC_TYPES = {
    400: _INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_status(error: ShoalError) -> tuple[int, str]:
    """Return the status and the error type in Anthropic's dialect, which is OpenAI's but for overload, 529 instead of
    503. What an operator must mend is not overload."""
    code = status(error)
    if isinstance(error, ModelFailed):
        return code, "api_error"
    if code == 503:
        code = 529
    return code, _ANTHROPIC_TYPES.get(code, _INVALID if code < 500 else "api_error")


def status_with_422(error: ShoalError) -> int:
    """Return the status in dialects that differ from OpenAI's in one: a body of the wrong type is 422."""
    return 422 if error.kind == "wrong_type" else find_row(error).openai.status


def headers(error: ShoalError, status: int) -> dict[str, str]:
    """Return the headers of an error, which are the same in every dialect.

    The OpenAI client libraries retry every status of 500 and above; `x-should-retry: false` prevents retries that would
    fail again. It is not sent for an upstream's refusal: Shoal cannot know, and the client behaves as it would with the
    upstream itself.
    """
    out: dict[str, str] = {}
    if error.retry_after is not None:
        out["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if status >= 500 and not error.retryable and not isinstance(error, UpstreamRefused):
        out["x-should-retry"] = "false"
    if isinstance(error, MethodNotAllowed):
        out["allow"] = error.allow
    if isinstance(error, Unauthorized):
        out["www-authenticate"] = "Bearer"
    return out
