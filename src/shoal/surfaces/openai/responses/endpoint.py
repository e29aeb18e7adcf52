"""The endpoint of OpenAI's Responses API: converts items to a task, and its chunks to items and typed events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shoal.http.json.extras import ExtrasDecoder
from shoal.http.request import Reply, Request
from shoal.surfaces.openai.events import AnswerHeader
from shoal.surfaces.openai.responses import wire
from shoal.surfaces.openai.responses.events import Plan, ResponseEvents, encode_body
from shoal.surfaces.openai.responses.history import REFERENCE, to_stored_items
from shoal.surfaces.openai.responses.options import start_response
from shoal.surfaces.openai.responses.reasoning import find_form
from shoal.surfaces.openai.responses.store import ResponseStore, Turn
from shoal.surfaces.openai.responses.task import Translation, translate
from shoal.surfaces.shared.generation import generate_reply
from shoal.surfaces.shared.owners import Owners

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.types import Fields


class Responses:
    """The responses endpoint. `store`: None stores nothing."""

    def __init__(self, gateway: Gateway, heartbeat_s: float, store: ResponseStore | None, owners: Owners) -> None:
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s
        self._store = store
        self._owners = owners
        self._decode: ExtrasDecoder[wire.ResponsesRequest] = ExtrasDecoder(wire.ResponsesRequest, "openai", "input")

    async def __call__(self, request: Request) -> Reply:
        payload, fields, extras = await self._decode(request.body)
        stores = self._should_store(payload, request)
        if self._store is not None and (stores or _refers(payload)):
            self._gateway.ensure_single_state()
        model, adapter = self._gateway.resolve(payload.model or "")
        owner = self._owners.find(request)
        found = translate(payload, (model, adapter), fields, extras, store=self._store, owner=owner)
        served = f"{model}:{adapter}" if adapter else model
        header = AnswerHeader.create(served, "resp_")
        plan = Plan(
            begun=start_response(payload, fields, header, stores=stores),
            names=found.tools.names,
            form=find_form(payload),
            keep=partial(self._keep, owner, header.id, payload, fields, found) if stores else _drop,
        )
        return await generate_reply(
            self._gateway,
            request,
            found.task,
            frames=partial(ResponseEvents, plan, request),
            body=partial(encode_body, plan),
            heartbeat_s=self._heartbeat_s,
            ignored=found.tools.ignored,
        )

    def _should_store(self, payload: wire.ResponsesRequest, request: Request) -> bool:
        """Whether to keep the response. Those of batches are in their files."""
        return self._store is not None and payload.store is not False and request.caller is None

    def _keep(
        self, owner: str, id: str, payload: wire.ResponsesRequest, fields: Fields, found: Translation, body: bytes
    ) -> None:
        assert self._store is not None
        history = found.history
        inputs = to_stored_items(fields["input"], payload, history)
        self._store.add(Turn(owner, id, history.previous, inputs, body))


def _drop(body: bytes) -> None:
    """Keep nothing."""


def _refers(payload: wire.ResponsesRequest) -> bool:
    """Whether a request refers to something that may be stored here."""
    items = [] if isinstance(payload.input, str) else payload.input
    return payload.previous_response_id is not None or any(item.type == REFERENCE for item in items)
