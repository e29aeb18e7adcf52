"""The routes of stored responses: show one, delete it, list the items that it answers."""

from __future__ import annotations

import msgspec

from shoal.batches.objects import paginate
from shoal.errors import ObjectNotFound, Unsupported
from shoal.http.request import JSON, Reply, Request
from shoal.surfaces.openai.responses import wire_output as wire
from shoal.surfaces.openai.responses.store import ResponseStore, Turn
from shoal.surfaces.shared.model_jobs import json_reply
from shoal.surfaces.shared.owners import Owners
from shoal.surfaces.shared.paging import read_choice, read_limit

MAX_PAGE = 100


class StoredResponses:
    """Endpoints over the store; None stores nothing. Raise ObjectNotFound for what is not there for this client."""

    def __init__(self, store: ResponseStore | None, owners: Owners) -> None:
        self._store = store
        self._owners = owners

    async def show(self, request: Request) -> Reply:
        if request.query_parameter("stream") == "true":
            raise Unsupported("'stream' is not supported: a stored response comes whole; omit it.", param="stream")
        return Reply(200, [JSON], self._find(request).body)

    async def delete(self, request: Request) -> Reply:
        turn = self._find(request)
        assert self._store is not None
        self._store.delete(turn.owner, turn.id)
        return json_reply(wire.DeletedResponse(id=turn.id))

    async def list_items(self, request: Request) -> Reply:
        items = self._find(request).before()
        if read_choice(request, "order", ("desc", "asc")) == "desc":
            items.reverse()
        limit = read_limit(request, 20, MAX_PAGE)
        page, has_more = paginate(items, request.query_parameter("after"), limit)
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        data = [msgspec.Raw(item.data) for item in page]
        return json_reply(wire.ItemList(data=data, first_id=first, last_id=last, has_more=has_more))

    def _find(self, request: Request) -> Turn:
        id = request.parameter
        turn = self._store.get(self._owners.find(request), id) if self._store is not None else None
        if turn is None:
            raise ObjectNotFound(
                f"Response with id {id[:100]!r} not found: it is not stored here, no longer, or for another client. "
                "Servers that speak the Responses API store their own; ask them.",
                param="response_id",
            )
        return turn
