"""Access control: keys on every route, Host names of this machine, and requests from other sites' pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from shoal.core.gateway import Gateway
from shoal.core.protocols import Operation
from shoal.core.recording import RequestLog, Tracer
from shoal.core.registry import Registry
from shoal.errors import ShoalError
from shoal.http.errors import OpenAIError, render_error
from shoal.surfaces import Options, Reply, Request, build_app
from tests.surfaces.life_kit import living
from tests.surfaces.surface_kit import MODEL, Answer, request_scope, serve
from tests.surfaces.surface_kit import Exchange as Exchanged

ASK = {"input": "ab", "model": MODEL}
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"
PUBLIC = {"/health", "/v1/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"}


def test_public_routes_are_few() -> None:
    """Only the health routes are public."""
    server = serve(metrics=lambda _: b"")
    public = {route.operation.path for route in server.app.routes.all if route.operation.access == "public"}
    assert public == PUBLIC


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a2V5"}])
async def test_every_route_requires_a_key(headers: dict[str, str]) -> None:
    """Every route answers 401 without a key, in its dialect, before it reads a body."""
    server = serve(metrics=lambda _: b"", api_key=("key",))
    walked = 0
    for route in server.app.routes.all:
        operation = route.operation
        if operation.access == "public":
            continue
        path = operation.path.replace("{id:path}", MODEL)
        for method in (operation.method, "HEAD") if operation.method == "GET" else (operation.method,):
            exchange = Exchanged([b"{"])
            scope = request_scope(method, path, {"host": "127.0.0.1", **headers})
            await server.app(scope, exchange.receive, exchange.send)
            answer = exchange.answer()
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert exchange.reads == 0
            walked += 1
    assert walked >= 15


@pytest.mark.parametrize(
    ("name", "value"),
    [("authorization", "Bearer key"), ("authorization", "bearer  key "), ("x-api-key", "key"), ("api-key", "key")],
)
async def test_headers_for_keys(name: str, value: str) -> None:
    """A key may be a Bearer token or be in either of the two headers that other clients use."""
    answer = await serve(api_key=("other", "key")).call("GET", "/v1/models", headers={name: value})
    assert answer.status == 200


async def test_unknown_key() -> None:
    """OpenAI's 401 distinguishes a missing key from a wrong one, and includes neither."""
    server = serve(api_key=("key",))
    missing = await server.call("POST", "/v1/embeddings", ASK)
    wrong = await server.call("POST", "/v1/embeddings", ASK, headers={"authorization": "Bearer sesame"})
    for answer in (missing, wrong):
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert b"sesame" not in answer.body
    assert missing.body != wrong.body


async def test_admin_key_works_on_user_routes() -> None:
    server = serve(api_key=("key",), admin_key=("root",))
    assert (await server.call("GET", "/v1/models", headers={"authorization": "Bearer root"})).status == 200


async def test_a_key_is_ignored_if_the_server_has_none() -> None:
    """Clients that always send a key work with a server without keys."""
    headers = {"authorization": "Bearer whatever"}
    assert (await serve().call("GET", "/v1/models", headers=headers)).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("LOCALHOST", 200),
        ("app.localhost", 200),
        ("127.0.0.1:8080", 200),
        ("127.9.9.9", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8080", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
async def test_hosts_without_keys(host: str, status: int) -> None:
    """Without keys on loopback, a Host that is not this machine is rejected: it may be DNS rebinding."""
    answer = await serve().call("POST", "/v1/embeddings", ASK, headers={"host": host})
    assert answer.status == status
    assert (await serve(api_key=("k",)).call("GET", "/health", headers={"host": host})).status == 200


async def test_other_hosts_with_keys_or_a_public_address() -> None:
    """The Host is not checked if the server has keys or listens on more than loopback."""
    headers = {"host": "ai.example", "authorization": "Bearer k"}
    assert (await serve(api_key=("k",)).call("GET", "/v1/models", headers=headers)).status == 200
    assert (await serve(host="0.0.0.0").call("GET", "/v1/models", headers=headers)).status == 200


FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"origin": "http://127.0.0.1:8080"}, 200),
    ({"origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"}, 200),
    ({"origin": "https://LISTED.example"}, 200),
    ({"origin": "https://listed.example", "sec-fetch-site": "cross-site"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    # A proxy changed the Host, but the browser says same-origin.
    ({"origin": "https://ai.example", "sec-fetch-site": "same-origin"}, 200),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ({"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"}, 403),
    ({"origin": "http://localhost:8080"}, 403),
    ({"origin": "null"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"origin": "", "sec-fetch-site": "cross-site"}, 403),
]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(("headers", "status"), FOREIGN)
async def test_pages_of_other_sites(headers: dict[str, str], status: int, host: str) -> None:
    """Without keys, POST requests from other sites' pages are rejected even though browsers would hide the answer. With
    keys they are not, and GET requests never are, because other sites may link here."""
    options: dict[str, Any] = {"host": host, "cors_origins": ("https://listed.example",)}
    server = serve(**options)
    answer = await server.call("POST", "/v1/embeddings", ASK, headers=headers)
    assert (answer.status, len(server.runner.tasks)) == (status, int(status == 200))
    if status == 403:
        assert answer.json()["error"]["type"] == "permission_error"
        assert "cors_origins" in answer.json()["error"]["message"]
    assert (await server.call("GET", "/v1/models", headers=headers)).status == 200
    keyed = serve(**options, api_key=("k",))
    sent = {**headers, "authorization": "Bearer k"}
    assert (await keyed.call("POST", "/v1/embeddings", ASK, headers=sent)).status == 200


async def test_no_route_works_for_pages_of_other_sites() -> None:
    """Every route except GET and health answers 403 in its dialect before it reads a body, also without a content type,
    which browsers send without a preflight."""
    server = serve(metrics=lambda _: b"")
    walked = 0
    for route in server.app.routes.all:
        operation = route.operation
        if operation.access == "public" or operation.method == "GET":
            continue
        exchange = Exchanged([b"{}"])
        headers = {"host": "127.0.0.1:8080", "origin": "https://evil.example"}
        scope = request_scope(operation.method, operation.path.replace("{id:path}", MODEL), headers)
        await server.app(scope, exchange.receive, exchange.send)
        assert (exchange.answer().status, exchange.reads) == (403, 0), operation.path
        walked += 1
    assert walked >= 15


async def test_an_admin_key_allows_other_sites() -> None:
    """On a server without user keys, a request with the admin key may come from another site."""
    server = serve(admin_key=("root",))
    headers = {"origin": "https://app.example"}
    assert (await server.call("POST", "/v1/embeddings", ASK, headers=headers)).status == 403
    headers["authorization"] = "Bearer root"
    assert (await server.call("POST", "/v1/embeddings", ASK, headers=headers)).status == 200


@pytest.mark.parametrize(
    ("key", "class_name", "traffic"),
    [
        ("batch", None, "bulk"),
        ("batch", "bulk", "bulk"),
        ("batch", "interactive", "bulk"),
        ("batch", "gold", "bulk"),
        ("person", None, "interactive"),
        ("person", "bulk", "bulk"),
        ("person", "interactive", "interactive"),
        ("plain", None, None),
        ("plain", "interactive", "interactive"),
        ("admin", None, "bulk"),
    ],
)
async def test_class_of_a_key(key: str, class_name: str | None, traffic: str | None) -> None:
    """The key's class is the default for the header; a bulk key stays bulk whatever the header says."""
    server = serve(api_key=("batch bulk", "person interactive", "plain"), admin_key=("admin bulk",))
    headers = {"authorization": f"Bearer {key}"} | ({"x-shoal-class": class_name} if class_name else {})
    answer = await server.call("POST", "/v1/embeddings", ASK, headers=headers)
    assert (answer.status, server.runner.contexts[0].traffic) == (200, traffic)
    wrong = await server.call("POST", "/v1/embeddings", ASK, headers={"authorization": f"Bearer {key} bulk"})
    assert wrong.status == 401


class Managed:
    """A surface with two admin routes: POST and GET."""

    name = "managed"
    error = OpenAIError

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(method="POST", path="/load", endpoint=self.done, summary="Load", access="admin"),
            Operation(method="GET", path="/secrets", endpoint=self.done, summary="Show", access="admin"),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)

    async def done(self, request: Request) -> Reply:
        return Reply(200, [], request.client.encode())


async def manage(
    method: str = "POST", path: str = "/load", *, client: Any = ("127.0.0.1", 1), options: Any = None, **headers: str
) -> Answer:
    app = build_app(Gateway(Registry()), [Managed()], Options(**(options or {})))
    exchange = Exchanged([b"{}"])
    sent = {"host": "localhost:8080", "content-type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in sent.items() if value != "-"}
    more = {} if "host" in sent else {"http_version": "1.0"}
    scope = request_scope(method, path, sent, client=client, **more)
    await app(scope, exchange.receive, exchange.send)
    return exchange.answer()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"client": ("::1", 1)},
        {"client": ("::ffff:127.0.0.1", 1)},
        {"origin": "http://localhost:8080"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"method": "GET", "path": "/secrets", "content_type": "-"},
    ],
)
async def test_keyless_admin_from_this_machine(changed: dict[str, Any]) -> None:
    """Programs on this machine, and the server's own pages, may manage a server without keys."""
    assert (await manage(**changed)).status == 200


@pytest.mark.parametrize(
    "changed",
    [
        {"client": ("10.0.0.7", 1)},
        {"client": None},
        {"client": ("not an address", 1)},
        {"host": "evil.example"},
        {"host": "-"},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"content_type": "text/plain"},
        {"content_type": "-"},
        {"method": "GET", "path": "/secrets", "sec_fetch_site": "cross-site"},
        {"options": {"host": "0.0.0.0"}, "client": ("192.168.0.2", 1)},
    ],
)
async def test_keyless_admin_from_elsewhere(changed: dict[str, Any]) -> None:
    """Admin requests from another machine, a proxy or another site are rejected."""
    answer = await manage(**changed)
    assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    "name",
    [
        *("Via", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Client-Cert"),
        *("X-Real-IP", "X-Client-IP", "True-Client-IP", "X-Cluster-Client-IP", "X-Original-Forwarded-For", "CDN-Loop"),
        *("CF-Connecting-IP", "CF-Ray", "CF-Visitor", "Fastly-Client-IP", "Fly-Client-IP", "DO-Connecting-IP"),
        *("X-Envoy-External-Address", "X-Envoy-Expected-Rq-Timeout-Ms", "X-Amzn-Trace-Id", "X-Amz-Cf-Id"),
        *(
            "X-Azure-ClientIP",
            "X-AppEngine-User-IP",
            "X-Cloud-Trace-Context",
            "X-Vercel-Id",
            "X-NF-Client-Connection-IP",
        ),
        *("Ngrok-Auth-User-Email", "Tailscale-User-Login", "X-ProxyUser-Ip", "WL-Proxy-Client-IP", "Client-IP"),
        *("X-Forwarded", "X-Forwarder-For", "X-Goog-IAP-JWT-Assertion", "X-Original-URL", "Proxy-Connection"),
        *("X-Scheme", "X-URL-Scheme", "X-Real-Port", "Front-End-Https", "X-Varnish", "Surrogate-Capability"),
        *(
            "Incap-Client-IP",
            "X-Sucuri-ClientIP",
            "Proxy-Client-IP",
            "X-NginX-Proxy",
            "X-BlueCoat-Via",
            "Z-Forwarded-For",
        ),
        *("Client-Cert", "X-SSL-Client-Verify", "Remote-User", "X-Remote-User", "X-WebAuth-User"),
        *("X-Auth-Request-User", "X-Authentik-Username"),
    ],
)
async def test_keyless_admin_behind_a_proxy(name: str) -> None:
    """A proxy header rejects admin requests, even if empty; it has no effect with an admin key or on user routes."""
    field = name.lower().replace("-", "_")
    for value in ("1.2.3.4", ""):
        answer = await manage(**{field: value})
        assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")
        assert name.lower() in answer.json()["error"]["message"]
        assert "--admin-key-file" in answer.json()["error"]["message"]
        keyed: dict[str, Any] = {"options": {"admin_key": ("root",)}, "authorization": "Bearer root"}
        assert (await manage(**keyed, **{field: value})).status == 200
    assert (await serve().call("POST", "/v1/embeddings", ASK, headers={name: "1.2.3.4"})).status == 200


ADMIN = {
    *("POST /load_sentence_transformer_model", "POST /unload_model", "POST /delete_model", "GET /jobs"),
    *("GET /jobs/{id:path}", "POST /v1/models/{id:path}/load", "POST /v1/models/{id:path}/unload"),
    *("DELETE /v1/models/{id:path}", "POST /models/load", "POST /models/unload", "DELETE /models"),
    *("POST /api/pull", "DELETE /api/delete", "POST /load_clip_model", "POST /load_model"),
    "GET /v1/requests/{id:path}",
    *("POST /v2/repository/models/{id:path}/load", "POST /v2/repository/models/{id:path}/unload"),
}
BODIES = {
    "POST /v1/models": b'{"model":"org/name"}',
    "POST /models": b'{"model":"org/name"}',
    "POST /models/load": b'{"model":"org/name"}',
    "POST /models/unload": b'{"model":"org/name"}',
    "POST /api/pull": b'{"model":"org/name"}',
    "DELETE /api/delete": b'{"model":"org/name"}',
}


class TrustingTracer:
    """Notes whether the caller of each request is trusted."""

    trace = ""

    def __init__(self) -> None:
        self.trusted: list[bool] = []

    def begin_request(self, *arguments: object, trusted: bool, **options: object) -> TrustingTracer:
        self.trusted.append(trusted)
        return self

    def end(self, record: object) -> None:
        """Of a span."""


PROXIED = {"trusted_proxies": ("10.0.0.0/8",)}
KEYED = {"api_key": ("k",)}


@pytest.mark.parametrize(
    ("options", "client", "headers", "trusted"),
    [
        ({}, "127.0.0.1", {}, True),
        ({}, "192.0.2.1", {}, False),
        ({}, "127.0.0.1", {"x_forwarded_for": "192.0.2.1"}, False),
        (PROXIED, "10.1.2.3", {}, True),
        (PROXIED, "10.1.2.3", {"x_real_ip": "192.0.2.1"}, False),
        (PROXIED, "192.0.2.1", {}, False),
        (KEYED, "192.0.2.1", {"authorization": "Bearer k"}, True),
        (KEYED, "192.0.2.1", {"authorization": "Bearer x"}, False),
        (KEYED, "127.0.0.1", {}, False),
        (KEYED | PROXIED, "10.1.2.3", {}, False),
    ],
)
async def test_whose_traces_are_continued(
    options: dict[str, Any], client: str, headers: dict[str, str], trusted: bool
) -> None:
    """Those of callers with a key; without keys of programs on this machine, and of listed addresses that are no
    proxies of others."""
    tracer = TrustingTracer()
    log = RequestLog(0, cast(Tracer, tracer))
    await manage(client=(client, 1), options=options | {"log": log}, traceparent=TRACEPARENT, **headers)
    await manage(client=(client, 1), options=options | {"log": log}, **headers)
    assert tracer.trusted == [trusted, True], "without a trace there is nothing to trust"


def test_admin_routes() -> None:
    """Exactly these routes require an admin; download routes check only once the body asks for a download."""
    routes = [route.operation for route in serve(metrics=lambda _: b"").app.routes.all]
    assert {f"{each.method} {each.path}" for each in routes if each.access == "admin"} == ADMIN
    deletions = {each.path: each.access for each in routes if each.method == "DELETE"}
    for path in ("/v1/files/{id:path}", "/v1/responses/{id:path}"):
        assert deletions.pop(path) == "user"  # only what is its own
    assert set(deletions.values()) == {"admin"}


@pytest.mark.parametrize("route", sorted(ADMIN | {"POST /v1/models", "POST /models"}))
@pytest.mark.parametrize(
    ("changed", "client", "status"),
    [
        ({}, "10.0.0.7", 403),
        ({"host": "evil.example"}, "127.0.0.1", 403),
        ({"x-forwarded-for": "1.2.3.4"}, "127.0.0.1", 403),
        ({"origin": "https://evil.example"}, "127.0.0.1", 403),
        ({"sec-fetch-site": "cross-site"}, "127.0.0.1", 403),
        ({"content-type": "text/plain"}, "127.0.0.1", 403),
        ({"content-type": ""}, "127.0.0.1", 403),
        ({"authorization": "Bearer key"}, "127.0.0.1", 403),
    ],
)
async def test_every_admin_route_is_guarded(route: str, changed: dict[str, str], client: str, status: int) -> None:
    """Every admin route applies these rules, with and without an admin key, also if it has no body."""
    method, path = route.replace("{id:path}", "org/name").split(" ")
    options: dict[str, Any] = {"api_key": ("key",), "admin_key": ("root",)} if "authorization" in changed else {}
    async with living(**options) as life:
        headers = {"host": "localhost", "content-type": "application/json", **changed}
        headers = {name: value for name, value in headers.items() if value}
        exchange = Exchanged([BODIES.get(route, b"")])
        scope = request_scope(method, path, headers, client=(client, 1))
        await life.server.app(scope, exchange.receive, exchange.send)
        expected = 200 if method == "GET" and "content-type" in changed else status
        if changed.get("content-type") == "text/plain" and path in ("/v1/models", "/models") and method == "POST":
            expected = 415  # rejected before the body is read
        answer = exchange.answer()
        if expected == 200:
            assert answer.status in (200, 404)
        else:
            assert answer.status == expected
        assert life.loader.touched == []


async def test_an_admin_key_manages_models_from_anywhere() -> None:
    """No JSON content type is needed if there is no body."""
    headers = {"host": "ai.example", "authorization": "Bearer root"}
    async with living(admin_key=("root",), host="0.0.0.0") as life:
        answer = await life.server.call("DELETE", f"/v1/models/{MODEL}", headers=headers, client=("10.0.0.7", 1))
        assert answer.status == 200
        answer = await life.server.call("POST", "/v1/models", {"model": "org/name"}, headers=headers)
        assert answer.status == 200


@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [
        ({"admin_key": ("root",)}, "root", 200),
        ({"admin_key": ("root",)}, "-", 401),
        ({"admin_key": ("root",)}, "wrong", 401),
        ({"admin_key": ("root",), "api_key": ("key",)}, "key", 403),
        ({"api_key": ("key",)}, "key", 200),
        ({"api_key": ("key",)}, "-", 401),
    ],
)
async def test_admin_keys(keys: dict[str, Any], sent: str, status: int) -> None:
    """If there is an admin key, only it can manage; if there are only user keys, a user key on this machine can."""
    authorization = sent if sent == "-" else f"Bearer {sent}"
    assert (await manage(options=keys, authorization=authorization)).status == status


async def test_an_admin_key_works_from_anywhere() -> None:
    """The loopback rule applies only to servers without an admin key."""
    options = {"admin_key": ("root",), "host": "0.0.0.0"}
    answer = await manage(client=("10.0.0.7", 1), host="ai.example", options=options, x_api_key="root")
    assert answer.status == 200


ORIGIN = "https://app.example"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}


async def test_cors_is_off_by_default() -> None:
    """Unless origins are listed, replies have no CORS headers, and a preflight is a 405."""
    server = serve()
    answer = await server.call("POST", "/v1/embeddings", ASK, headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await server.call("OPTIONS", "/v1/embeddings", headers=PREFLIGHT)).status == 405


async def test_cors_for_a_listed_origin() -> None:
    """Answers and errors echo the exact origin, and the preflight allows the headers that clients send."""
    server = serve(cors_origins=(ORIGIN,), api_key=("k",))
    preflight = await server.call("OPTIONS", "/v1/embeddings", headers=PREFLIGHT)
    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-methods"] == "POST"
    allowed = preflight.headers["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type", "x-stainless-lang", "x-stainless-retry-count"} <= set(allowed)
    # What Anthropic's client library sends in a browser.
    assert {"anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"} <= set(allowed)
    refused = await server.call("POST", "/v1/embeddings", ASK, headers={"origin": ORIGIN})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    headers = {"origin": ORIGIN, "authorization": "Bearer k"}
    answer = await server.call("POST", "/v1/embeddings", ASK, headers=headers)
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {"retry-after", "x-request-id", "x-should-retry", "inference-header-content-length"} <= exposed
    documented = {name for route in server.app.routes.all for name in route.operation.headers}
    assert documented - exposed == set()
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize("origin", ["https://app.example.evil", "http://app.example", "null", ""])
async def test_cors_for_other_origins(origin: str) -> None:
    """An origin must match exactly."""
    server = serve(cors_origins=(ORIGIN,))
    answer = await server.call("POST", "/v1/embeddings", ASK, headers={"origin": origin})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "origin"
    assert (await server.call("OPTIONS", "/v1/embeddings", headers={**PREFLIGHT, "origin": origin})).status == 405
    assert (await server.call("OPTIONS", "/nowhere", headers=PREFLIGHT)).status == 404
