"""A server that speaks as OpenAI's does, asked from the command line."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from shoal.errors import SetupError, TransportFailed
from shoal.settings import Settings

# Nobody waits behind this queue: only a hang should end it.
PATIENCE_S = 3600.0


class Server:
    """The one at `url`, asked with a key of the settings."""

    def __init__(self, url: str, settings: Settings) -> None:
        keys = [entry.partition(" ")[0] for entry in settings.api_key]  # without their classes
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if keys:
            self._headers["authorization"] = f"Bearer {keys[0]}"

    def first_model(self) -> str:
        """The first one that it lists. Raises SetupError when it lists none, and what `ask` raises."""
        try:
            return str(self.ask("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise SetupError(f"{self._url} lists no model: name one with --model") from None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST `body`, or GET. Raises TransportFailed when nothing answers as such a server would, SetupError when it
        refuses."""
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        url = self._url + path
        try:
            request = Request(url, None if body is None else json.dumps(body).encode(), self._headers)
            with urlopen(request, timeout=PATIENCE_S) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except HTTPError as error:
            with error:
                raise SetupError(f"{url} answered {error.code}: {_reason(error.read())}") from None
        except (OSError, ValueError) as error:
            raise TransportFailed(f"{url} does not answer ({error}): is `shoal serve` running there?") from None


def _reason(body: bytes) -> str:
    """The message in a refusal of any dialect."""
    with contextlib.suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, dict):
            error = found.get("error", found.get("detail", found))
            text = error.get("message") if isinstance(error, dict) else error
            if isinstance(text, str):
                return text
    return body[:200].decode(errors="replace")
