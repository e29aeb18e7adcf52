"""Cross-origin requests (CORS): off by default, and allowed for exactly the listed origins."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.http.request import Headers, Reply, Request

_STAINLESS = "arch async helper-method lang os package-version poll-helper read-timeout retry-count runtime timeout"
_ALLOWED_HEADERS = ", ".join(
    [
        "accept",
        "anthropic-beta",
        "anthropic-dangerous-direct-browser-access",
        "anthropic-version",
        "api-key",
        "authorization",
        "content-type",
        "idempotency-key",
        "inference-header-content-length",
        "openai-beta",
        "openai-organization",
        "openai-project",
        "user-agent",
        "x-api-key",
        "x-request-id",
        "x-request-timeout",
        "x-session-id",
        "x-shoal-class",
        *(f"x-stainless-{name}" for name in _STAINLESS.split()),
    ]
).encode()
_EXPOSED_HEADERS = ", ".join(
    [
        "inference-header-content-length",
        "request-id",
        "retry-after",
        "server-timing",
        "x-compute-characters",
        "x-compute-time",
        "x-compute-tokens",
        "x-compute-type",
        "x-inference-time",
        "x-queue-time",
        "x-request-id",
        "x-shoal-backend",
        "x-shoal-batch-id",
        "x-shoal-batch-size",
        "x-shoal-batches",
        "x-shoal-cached",
        "x-shoal-dtype",
        "x-shoal-flush",
        "x-shoal-ignored",
        "x-shoal-prompt-cut",
        "x-shoal-queue-ms",
        "x-shoal-shape",
        "x-shoal-space",
        "x-shoal-token-ids",
        "x-shoal-truncated",
        "x-should-retry",
        "x-tokenization-time",
        "x-total-time",
    ]
).encode()
_MAX_AGE = (b"access-control-max-age", b"600")
_VARY = (b"vary", b"origin")


class Cors:
    """Builds CORS headers. `origins` are exact (scheme, host and port); patterns are not supported."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def headers(self, request: Request) -> Headers:
        """Return the CORS headers of the reply to this request."""
        if not self._origins:
            return []
        origin = request.headers.get(b"origin", b"")
        if origin.lower() not in self._origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED_HEADERS), _VARY]

    def answer_preflight(self, request: Request, allow: str) -> Reply | None:
        """Return the reply to a preflight request of a listed origin, or None for any other request."""
        headers = request.headers
        if request.method != "OPTIONS" or not allow or b"access-control-request-method" not in headers:
            return None
        if headers.get(b"origin", b"").lower() not in self._origins:
            return None
        methods = (b"access-control-allow-methods", allow.encode())
        return Reply(204, [methods, (b"access-control-allow-headers", _ALLOWED_HEADERS), _MAX_AGE])
