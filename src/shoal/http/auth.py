"""Authenticate and authorize callers, on the matched operation and never on a URL rebuilt from headers."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import NamedTuple, cast

from shoal.core.protocols import Access
from shoal.errors import Forbidden, Unauthorized
from shoal.http.headers import host_name, is_loopback, is_loopback_name
from shoal.http.request import Options, Request
from shoal.types import TrafficClass

_SAFE_METHODS = frozenset({"GET", "HEAD"})
_KEY = "key:"

PROXY_HEADERS = frozenset(
    {
        b"akamai-origin-hop",
        b"cdn-loop",
        b"client-cert",
        b"client-cert-chain",
        b"client-ip",
        b"do-connecting-ip",
        b"fastly-client-ip",
        b"fly-client-ip",
        b"forwarded",
        b"forwarded-for",
        b"front-end-https",
        b"http-client-ip",
        b"incap-client-ip",
        b"max-forwards",
        b"proxy-authorization",
        b"proxy-client-ip",
        b"proxy-connection",
        b"real-ip",
        b"remote-user",
        b"surrogate-capability",
        b"true-client-ip",
        b"via",
        b"wl-proxy-client-ip",
        b"x-amz-cf-id",
        b"x-amzn-trace-id",
        b"x-appengine-user-ip",
        b"x-arr-clientip",
        b"x-azure-clientip",
        b"x-azure-fdid",
        b"x-azure-socketip",
        b"x-bluecoat-via",
        b"x-client-ip",
        b"x-cloud-trace-context",
        b"x-cluster-client-ip",
        b"x-coming-from",
        b"x-host",
        b"x-nginx-proxy",
        b"x-original-host",
        b"x-original-url",
        b"x-proxyuser-ip",
        b"x-real-ip",
        b"x-real-port",
        b"x-remote-addr",
        b"x-remote-ip",
        b"x-remote-user",
        b"x-rewrite-url",
        b"x-scheme",
        b"x-true-ip",
        b"x-url-scheme",
        b"x-varnish",
        b"x-webauth-user",
        b"z-forwarded-for",
    }
)
PROXY_PREFIXES = (
    *(b"cf-", b"fastly-", b"ngrok-", b"tailscale-", b"x-auth-request-", b"x-authentik-", b"x-envoy-", b"x-forward"),
    *(b"x-goog-iap-", b"x-nf-", b"x-original-forwarded-", b"x-proxy-", b"x-ssl-client-", b"x-sucuri-", b"x-vercel-"),
)
"""Headers that proxies, load balancers, CDNs and tunnels add. A proxy on this machine hides its remote clients."""


BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site"})
"""Headers of cross-site browser requests: each has at least one of them."""


class Caller(NamedTuple):
    """The caller. `client` is the identity for fair sharing, `traffic` the class that the operator gave its key."""

    client: str
    traffic: TrafficClass | None = None


class _Key(NamedTuple):
    digest: bytes
    caller: Caller
    admin: bool


class Gate:
    """Checks access. `admit` identifies the caller by its key, else the trusted header if the peer is a trusted proxy,
    else the peer address. Requests that the server makes to itself have their caller, and the rights of a user.

    - "public": no requirement.
    - "user": a key, if any is configured. Without keys, requests from pages of other sites are refused unless their
      origin is listed, because browsers send some requests without a preflight. If such a server is bound to a loopback
      address, the Host must be that address or a loopback name (DNS rebinding: a page may point its own name at
      127.0.0.1 to read replies).
    - "admin": an admin key. If none is configured: the requirements of "user", and a program on this machine or a page
      of this server as the caller.
    """

    def __init__(self, options: Options) -> None:
        self._keys = [_parse_key(text, admin=False) for text in options.api_key]
        self._keys += [_parse_key(text, admin=True) for text in options.admin_key]
        self._users_need_keys = bool(options.api_key)
        self._admins_need_keys = bool(options.admin_key)
        self._bound = options.host.encode().lower()
        self._bound_to_loopback = is_loopback_name(self._bound)
        self._client_header = options.client_header.lower().encode()
        self._proxies = [ipaddress.ip_network(each) for each in options.trusted_proxies]
        self._origins = frozenset(origin.lower().encode() for origin in options.cors_origins)

    def admit(self, request: Request, access: Access) -> Caller:
        """Return the caller. Raises Unauthorized without a valid key, and Forbidden if the caller lacks the right."""
        if request.caller is not None and access != "admin":
            return request.caller
        key = self._find_key(request) if self._keys else None
        if access == "admin":
            self._admit_admin(request, key)
        elif access != "public":
            self._admit_user(request, key)
        if key is not None:
            return key.caller
        name = request.headers.get(self._client_header) if self._client_header else None
        if name and self._is_trusted(request.peer):
            return Caller(name[:128].decode("latin-1"))
        return Caller(request.peer)

    def is_revoked(self, client: str) -> bool:
        """Return whether this identity is that of a key that is none of these, while users need one."""
        known = (each.caller.client for each in self._keys)
        return self._users_need_keys and client.startswith(_KEY) and client not in known

    def trusts_trace(self, request: Request) -> bool:
        """Return whether the caller's trace may be continued, and so decide whether the request is recorded: that of a
        caller with a valid key, or, if the server has no keys, of a program on this machine or at a listed address; and
        of the server itself. What a proxy passes on is the trace of anyone behind it. Without a trace there is nothing
        to distrust."""
        if b"traceparent" not in request.headers or request.is_traced or request.caller is not None:
            return True
        if self._keys:
            return self._find_key(request) is not None
        is_direct = _find_proxy_mark(request.headers) is None
        return not _explain_remote(request) or (is_direct and self._is_listed(request.peer))

    def _is_trusted(self, peer: str) -> bool:
        """Return whether this peer may name the client: any peer unless proxies are listed."""
        return not self._proxies or self._is_listed(peer)

    def _is_listed(self, peer: str) -> bool:
        address = _parse_address(peer) if self._proxies else None
        return address is not None and any(address in each for each in self._proxies)

    def _admit_user(self, request: Request, key: _Key | None) -> None:
        if self._users_need_keys:
            if key is None:
                raise _unauthorized_error(request)
            return
        if self._bound_to_loopback:
            host = request.headers.get(b"host")
            if host is not None and not is_loopback(host) and host_name(host) != self._bound:
                raise Forbidden(
                    "The Host header is not the address that the server is bound to; use localhost, "
                    "or set --api-key or --host to serve other names."
                )
        if (
            key is None
            and request.method not in _SAFE_METHODS
            and not BROWSER_HEADERS.isdisjoint(request.headers)
            and self._is_foreign(request.headers)
        ):
            raise Forbidden(
                "The request comes from a page of another origin, and this server requires no key; add the origin to "
                "cors_origins, or set --api-key."
            )

    def _is_foreign(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a page that is neither of this server nor of a listed origin sent the request.

        Sec-Fetch-Site takes precedence over comparing Origin and Host, because a proxy may have changed the Host.
        """
        if headers.get(b"origin", b"").lower() in self._origins:
            return False
        return not _is_same_site(headers) if b"sec-fetch-site" in headers else not _is_own_origin(headers)

    def _admit_admin(self, request: Request, key: _Key | None) -> None:
        if self._admins_need_keys:
            if key is None:
                raise _unauthorized_error(request)
            if not key.admin:
                raise Forbidden("This key cannot manage the server; use an admin key.")
            return
        self._admit_user(request, key)
        reason = _explain_remote(request)
        if reason:
            raise Forbidden(
                f"Without an admin key, only programs on the server's own machine can manage it, but {reason}; "
                "set --admin-key-file."
            )

    def _find_key(self, request: Request) -> _Key | None:
        secret = _read_secret(request)
        if secret is None:
            return None
        digest = hashlib.sha256(secret).digest()
        found = None
        for key in self._keys:  # compare all, so that timing does not reveal which one matched
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _parse_key(entry: str, *, admin: bool) -> _Key:
    """Parse a key of the settings: the secret, optionally followed by a space and its class."""
    secret, _, traffic = entry.partition(" ")
    digest = hashlib.sha256(secret.encode())
    caller = Caller(f"{_KEY}{digest.hexdigest()[:12]}", cast(TrafficClass, traffic) if traffic else None)
    return _Key(digest.digest(), caller, admin)


def _read_secret(request: Request) -> bytes | None:
    headers = request.headers
    scheme, _, secret = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and secret.strip():
        return secret.strip()
    return headers.get(b"x-api-key") or headers.get(b"api-key")


def _unauthorized_error(request: Request) -> Unauthorized:
    if _read_secret(request) is None:
        return Unauthorized("The request has no API key; add the header 'Authorization: Bearer <key>'.")
    return Unauthorized("The API key is invalid; check it, or ask the operator of this server for one.")


def _explain_remote(request: Request) -> str:
    """Return why the request may come from outside this machine, or from another site's page; "" if it cannot."""
    headers = request.headers
    host = headers.get(b"host", b"")
    if not _is_peer_loopback(request.peer):
        return "the request comes from another machine"
    if not is_loopback(host):
        return "the Host header is not a loopback name"
    mark = _find_proxy_mark(headers)
    if mark is not None:
        return f"the header {mark[:64].decode('latin-1')!r} shows that the request came through a proxy"
    if not (_is_own_origin(headers) and _is_same_site(headers)):
        return "the request comes from a page of another origin"
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if request.method not in _SAFE_METHODS and kind != b"application/json":
        return "the content type is not application/json"
    return ""


def _find_proxy_mark(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the name of a header that only a proxy sends, None if there is none."""
    return next((name for name in headers if name in PROXY_HEADERS or name.startswith(PROXY_PREFIXES)), None)


def _is_own_origin(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the Origin matches the Host, or is absent, as in requests of programs."""
    origin = headers.get(b"origin")
    host = headers.get(b"host", b"").lower()
    return origin is None or origin.lower() in {b"http://" + host, b"https://" + host}


def _is_same_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser reports a page of this origin, or the user, as the source; true for other programs."""
    return headers.get(b"sec-fetch-site", b"none") in {b"none", b"same-origin"}


def _is_peer_loopback(peer: str) -> bool:
    address = _parse_address(peer)
    return address is not None and address.is_loopback


def _parse_address(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the peer's address, as IPv4 if it is one that an IPv6 socket shows; None for a Unix socket."""
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
