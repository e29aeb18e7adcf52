"""Who owns what a client has made: files, batches, stored responses."""

from __future__ import annotations

import hashlib

from shoal.http.request import Options, Request


class Owners:
    """Names the owner of what a request makes, by its client's key or name. Without keys and names of clients, all of
    them are one owner, ""."""

    def __init__(self, options: Options) -> None:
        self._has_owners = bool(options.api_key or options.client_header)

    def find(self, request: Request) -> str:
        return hashlib.sha256(request.client.encode()).hexdigest()[:32] if self._has_owners else ""
