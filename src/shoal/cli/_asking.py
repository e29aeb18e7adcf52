"""HTTP client for the commands that talk to a running server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.config import is_loopback
from shoal.errors import ConfigError, SetupError, TransportFailed

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from shoal.types import TaskKind

# A request may wait in a queue with no other user behind it, so only a hang should time out.
REQUEST_TIMEOUT_S = 3600.0

# Appended to a 401: the server's message speaks of headers, which a command line cannot set.
_KEYS = (
    " (the key comes from SHOAL_API_KEY, or SHOAL_ADMIN_KEY for `ps`, `load` and similar commands, or from shoal.toml)"
)


class KeyRefused(SetupError):
    """A server answers, and refuses the key."""


class ServerClient:
    """Client of the server at `url`, authenticated with `key`.

    Every call raises TransportFailed if no such server answers at `url`, and SetupError with the server's own reason if
    it rejects the request. Raises ConfigError if `url` is not a URL.
    """

    def __init__(self, url: str, key: str | None = None, *, patience_s: float = REQUEST_TIMEOUT_S) -> None:
        from urllib.parse import urlsplit
        from urllib.request import ProxyHandler, build_opener

        try:
            parts = urlsplit(url)
        except ValueError:  # an incomplete IPv6 address
            raise ConfigError(f"--url {url}: write http://host:port", param="--url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: write http://host:port", param="--url")
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        # Bypass the environment's proxy for loopback: to a proxy, 127.0.0.1 is the proxy's own machine.
        self._opener = build_opener(*([ProxyHandler({})] if is_loopback(parts.hostname) else []))

    def first_model(self, task: TaskKind) -> str:
        """Return the first listed model that supports `task` or does not list its tasks.

        Raises SetupError if there is none.
        """
        found = self.list_models(task)
        if not found:
            raise SetupError(f"{self.url} has no model that can {task}: name one with --model")
        return found[0]

    def list_models(self, task: TaskKind) -> list[str]:
        """Return the models that support `task` or do not list their tasks; none if the list has another form."""
        try:
            return [str(one["id"]) for one in self.ask("/v1/models")["data"] if task in one.get("tasks", [task])]
        except (LookupError, TypeError, AttributeError):
            return []

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None) -> dict[str, Any]:
        """POST `body` as JSON, or GET if it is None, and return the decoded JSON object."""
        with self.open(path, body, method=method) as reply, self._translate_errors():
            try:
                found = json.loads(reply.read())
            except ValueError:
                raise TransportFailed(f"{self.url} does not return JSON: is it a Shoal server?") from None
        if not isinstance(found, dict):
            raise TransportFailed(f"{self.url} does not respond like Shoal: is it a Shoal server?")
        return found

    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str | None = None,
        accept: str = "application/json",
    ) -> HTTPResponse:
        """Send a request and return the response as soon as its headers have arrived."""
        from urllib.error import HTTPError
        from urllib.request import Request

        data = None if body is None else json.dumps(body).encode()
        # Sent even without a body: a browser page cannot send it cross-origin without permission, so the server
        # requires it.
        headers = {**self._headers, "accept": accept, "content-type": "application/json"}
        with self._translate_errors():
            try:
                reply: HTTPResponse = self._opener.open(
                    Request(self.url + path, data, headers, method=method), timeout=self._patience_s
                )
                return reply
            except HTTPError as error:
                with error:
                    message = f"{self.url}{path} answered {error.code}: {extract_reason(error.read())}"
                kind = KeyRefused if error.code in (401, 403) else SetupError
                raise kind(message + (_KEYS if error.code == 401 else "")) from None
            except ValueError as error:  # characters not allowed in a host, path or header
                raise ConfigError(f"{self.url} cannot be reached: check --url and the key ({error})") from None

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        from http.client import HTTPException

        try:
            yield
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise TransportFailed(
                f"no response from {self.url} ({reason}): is a server running there? `shoal serve` starts one"
            ) from None


def first_key(*keys: str) -> str | None:
    """Return the first key of a setting, without its class; None if there is none."""
    return keys[0].partition(" ")[0] if keys else None


def extract_reason(body: bytes) -> str:
    """Return the message of an error body in any API dialect."""
    with contextlib.suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, dict):
            error = found.get("error", found.get("detail", found))
            text = error.get("message") if isinstance(error, dict) else error
            if isinstance(text, str):
                return text
    return body[:200].decode(errors="replace").strip() or "no reason given"
