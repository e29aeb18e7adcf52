"""The input and output of an endpoint: a request that is parsed lazily, and a reply of plain bytes."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from shoal.core.protocols import Access
from shoal.core.recording import RequestLog
from shoal.errors import Forbidden, InternalError, ShoalError, Unauthorized
from shoal.http.exchange import EXTENSION, Exchange
from shoal.http.headers import combine_headers
from shoal.http.images import ImageReader
from shoal.types import Context, Result, TrafficClass, Usage

if TYPE_CHECKING:
    from shoal.http.auth import Caller, Gate

Headers: TypeAlias = list[tuple[bytes, bytes]]
Body: TypeAlias = bytes | list[bytes] | AsyncIterator[bytes]
ErrorRenderer: TypeAlias = Callable[[ShoalError], tuple[int, dict[str, str], bytes]]

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""Ids of requests that clients may choose."""

CALLER = "shoal.caller"
"""The extension of ASGI's scope that holds the Caller of a request which the server makes to itself."""

TRACED = "shoal.traced"
"""The extension of ASGI's scope of a request whose `traceparent` is of another process of this server."""

MAX_SESSION = 256
"""Bytes of a session's name that count."""

JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings that surfaces read, under their usual names.

    An `api_key` or `admin_key` may end in a space and a class: `KEY bulk`.
    `metrics` returns the Prometheus text of the named metrics, or of all if none is named, and is called in a
    thread; None disables /metrics. `metrics_default` is the format of /metrics for clients that ask for none.
    `image_reader` reads the images of requests; None: nothing is fetched, and a file may have at most 20 MiB.
    `address_schemes` are the schemes of model addresses. `log` records the requests (None: nobody does).
    """

    host: str = "127.0.0.1"
    api_key: tuple[str, ...] = ()
    admin_key: tuple[str, ...] = ()
    max_body_bytes: int = 16_777_216
    batch_file_mb: int = 200
    response_store_mb: int = 64
    response_store_s: float = 3600.0
    max_inputs: int = 2048
    max_queue_items: int = 16_384
    max_batch_size: int = 64
    max_batch_tokens: int = 16_384
    truncate: bool = True
    embed_timeout_s: float = 30.0
    generate_timeout_s: float = 600.0
    heartbeat_s: float = 15.0
    body_timeout_s: float = 30.0
    client_header: str = ""
    trusted_proxies: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    metrics: Callable[[Collection[str]], bytes] | None = None
    metrics_default: Literal["prometheus", "json"] = "prometheus"
    embed_dialect: Literal["tei", "auto-batching-proxy"] = "tei"
    status_dialect: Literal["shoal", "infinity"] = "shoal"
    batch_info: bool = False
    any_model: bool = False
    token_ids: Literal["refuse", "accept"] = "refuse"
    image_reader: ImageReader | None = None
    address_schemes: Container[str] = ()
    log: RequestLog | None = None

    @classmethod
    def from_settings(
        cls,
        settings: object,
        metrics: Callable[[Collection[str]], bytes] | None = None,
        image_reader: ImageReader | None = None,
        address_schemes: Container[str] = (),
        log: RequestLog | None = None,
    ) -> Options:
        """Take the options from `settings`, which has an attribute for each. The caller reads key files."""
        others = ("metrics", "image_reader", "address_schemes", "log")
        names = [each.name for each in fields(cls) if each.name not in others]
        values: dict[str, Any] = {name: getattr(settings, name) for name in names}
        return cls(**values, metrics=metrics, image_reader=image_reader, address_schemes=address_schemes, log=log)


class Reply(msgspec.Struct):
    """A reply. `body` is sent in one piece, in the given pieces with one Content-Length, or as a stream of pieces."""

    status: int = 200
    headers: Headers = msgspec.field(default_factory=list)
    body: Body = b""


class Request:
    """One HTTP request. `headers` has lower-case names; the values of a repeated header are joined to a list.

    `body` is read before the endpoint is called, for methods that have one, unless the operation `reads_body`: then
    `pieces` yields it. `caller`: who makes a request of the server to itself (see http.in_process). `parameter` is the
    path parameter, `query` the part after the "?", `gate` the Gate that admitted the caller. `started` and `deadline`
    are seconds of the monotonic clock. `client` is the identity for fair sharing, `key_class` the class of the caller's
    key. `has_response`: the head of a stream has been sent. `is_forwarded`: another process answers it, and logs it.
    The endpoint sets `model`, `items`, `result` and `usage` for the access log; `usage` also in mid-stream. `failure`:
    the kind of the error that ended a stream whose status had been sent. `render_error` renders errors from then on, if
    the body shows that the client speaks another dialect than the surface's own. `error`: the kind of the error that it
    was answered with. `surface`: the name of the one that answers. `is_traced`: another process of this server has
    begun its trace. `trace` as in Context.
    """

    id: str = ""
    deadline: float = math.inf
    client: str = ""
    gate: Gate | None = None
    caller: Caller | None = None
    pieces: AsyncIterator[bytes] | None = None
    exchange: Exchange | None = None
    key_class: TrafficClass | None = None
    parameter: str = ""
    body: bytes = b""
    body_read: bool = False
    is_handed_over: bool = False
    has_response: bool = False
    is_forwarded: bool = False
    model: str = ""
    items: int = 0
    result: Result | None = None
    usage: Usage | None = None
    failure: str = ""
    error: str = ""
    surface: str = ""
    is_traced: bool = False
    trace: str = ""
    render_error: ErrorRenderer | None = None

    def __init__(self, scope: Mapping[str, Any], started: float) -> None:
        self.method: str = scope["method"]
        path: str = scope["path"]
        root = scope.get("root_path")
        if root and path.startswith(root):
            path = path[len(root) :]
        self.path = path
        self.query: bytes = scope.get("query_string", b"")
        raw = scope["headers"]
        headers = dict(raw)
        self.headers: dict[bytes, bytes] = headers if len(headers) == len(raw) else combine_headers(raw)
        peer = scope.get("client")
        self.peer: str = peer[0] if peer else ""
        self.started = started
        extensions = scope.get("extensions")
        if extensions:
            self.exchange = extensions.get(EXTENSION)
            self.caller = extensions.get(CALLER)
            self.is_traced = TRACED in extensions

    @property
    def traffic(self) -> TrafficClass | None:
        """The class in `x-shoal-class`, else the key's class; None lets the size of the request decide.

        A bulk key always gives "bulk": its class is a limit set by the operator, not a default.
        """
        if self.key_class == "bulk":
            return "bulk"
        match self.headers.get(b"x-shoal-class"):
            case b"interactive":
                return "interactive"
            case b"bulk":
                return "bulk"
            case _:
                return self.key_class

    def context(self) -> Context:
        """Return the Context for the gateway, which counts the outcome of the request from here on."""
        self.is_handed_over = True
        traffic = self.traffic if b"x-shoal-class" in self.headers else self.key_class
        session = self.headers.get(b"x-session-id", b"")[:MAX_SESSION].decode("latin-1")
        return Context(
            id=self.id,
            deadline=self.deadline,
            client=self.client,
            traffic=traffic,
            session=session,
            surface=self.surface,
            trace=self.trace,
            arrived=self.started,
        )

    def require_access(self, access: Access) -> None:
        """Require more access than the route does, depending on the body. Raises Unauthorized or Forbidden."""
        if self.gate is None:
            raise InternalError("permission requested before authentication")
        self.gate.admit(self, access)

    def has_access(self, access: Access) -> bool:
        """Whether the caller has this access."""
        try:
            self.require_access(access)
        except (Unauthorized, Forbidden):
            return False
        return True

    def query_parameter(self, name: str) -> str | None:
        """Return a decoded query parameter: the last one if repeated, None if missing."""
        found = dict(parse_qsl(self.query.decode("latin-1"), keep_blank_values=True)) if self.query else {}
        return found.get(name)

    def accepts_json(self) -> bool:
        """Whether the Accept header names application/json; `*/*` does not count."""
        return b"application/json" in self.headers.get(b"accept", b"")


def choose_timeout(value: bytes | None, most: float) -> float:
    """Return the client's timeout in seconds, or `most` if it is absent, invalid or larger."""
    try:
        seconds = float(value or b"")
    except ValueError:
        return most
    return min(seconds, most) if seconds > 0 else most
