"""Put what a request refers to in the place of its references: stored responses and their items."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.errors import InvalidValue
from shoal.surfaces.openai.events import ENCODE
from shoal.surfaces.openai.responses import wire
from shoal.surfaces.openai.responses.store import ResponseStore, StoredItem, Turn
from shoal.surfaces.shared.wire_conversations import MAX_MESSAGES

REFERENCE = "item_reference"
MAX_BYTES = 32 << 20
"""Bytes of stored items that a request may bring back: twice what a body may have by default."""
_ITEM = msgspec.json.Decoder(wire.InputItem)
_FIELDS: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class History(msgspec.Struct):
    """The conversation of a request. `items`: all of it, a text or items. `previous`: the stored response that it goes
    on from. `references`: the stored items among its own, by their ids."""

    items: str | Sequence[wire.InputItem]
    previous: Turn | None = None
    references: dict[str, StoredItem] = {}

    @property
    def is_stored(self) -> bool:
        """Whether a part of the conversation is only here, so that no other server can read the body as it came."""
        return self.previous is not None or bool(self.references)


def read_history(payload: wire.ResponsesRequest, store: ResponseStore | None, owner: str) -> History:
    """Raises InvalidValue for a reference to what is not stored here, or not for this client."""
    own: Sequence[wire.InputItem] = (
        [wire.InputItem(type="message", role="user", content=msgspec.Raw(ENCODE(payload.input)))]
        if isinstance(payload.input, str)
        else payload.input
    )
    references: dict[str, StoredItem] = {}
    for at, item in enumerate(own):
        if item.type == REFERENCE and item.id is not None and item.id not in references:
            references[item.id] = _find_item(store, owner, item.id, f"input[{at}]")
    previous = None
    if payload.previous_response_id is not None:
        previous = store.get(owner, payload.previous_response_id) if store is not None else None
        if previous is None:
            raise _not_found("Previous response", payload.previous_response_id, "previous_response_id", store)
    if previous is None and not references:
        return History(payload.input)
    before = [] if previous is None else [*previous.before(), *previous.outputs()]
    if len(before) + len(own) > MAX_MESSAGES:
        raise InvalidValue(
            f"The conversation has more than {MAX_MESSAGES} items; begin a new one.", param="previous_response_id"
        )
    _check_size(before, own, references)
    found = {id: _ITEM.decode(item.data) for id, item in references.items()}
    items = [_ITEM.decode(item.data) for item in before]
    items += [found[item.id] if item.type == REFERENCE and item.id is not None else item for item in own]
    return History(items, previous, references)


def to_stored_items(raw: msgspec.Raw, payload: wire.ResponsesRequest, history: History) -> list[StoredItem]:
    """Return the items that are new in a request, each with an id and a type, and stored ones in the place of
    references. `raw`: its field `input`."""
    if isinstance(payload.input, str):
        content = [{"type": "input_text", "text": payload.input}]
        raw = msgspec.Raw(ENCODE([{"role": "user", "content": content}]))
        return [_to_stored(each, wire.InputItem(role="user")) for each in _RAW_ITEMS.decode(raw)]
    made = []
    for each, item in zip(_RAW_ITEMS.decode(raw), payload.input, strict=True):
        stored = history.references.get(item.id or "") if item.type == REFERENCE else None
        made.append(stored or _to_stored(each, item))
    return made


def _to_stored(raw: msgspec.Raw, item: wire.InputItem) -> StoredItem:
    """Return an item with its id and type, which it may lack."""
    id = item.id
    if id is not None and item.type is not None:
        return StoredItem(id, bytes(raw))
    id = id or f"{'msg' if item.role is not None else 'item'}_{secrets.token_hex(16)}"
    return StoredItem(id, ENCODE(_FIELDS.decode(raw) | {"id": id, "type": item.type or "message"}))


def _check_size(before: Sequence[StoredItem], own: Sequence[wire.InputItem], references: dict[str, StoredItem]) -> None:
    """A few bytes can refer to many: raises InvalidValue for more than MAX_BYTES."""
    size = sum(len(item.data) for item in before)
    size += sum(len(references[item.id].data) for item in own if item.type == REFERENCE and item.id is not None)
    if size > MAX_BYTES:
        raise InvalidValue(
            f"The stored items of the conversation have {size} bytes, and {MAX_BYTES} are read; begin a new one.",
            param="input",
        )


def _find_item(store: ResponseStore | None, owner: str, id: str, where: str) -> StoredItem:
    found = store.find_item(owner, id) if store is not None else None
    if found is None:
        raise _not_found(f"'{where}': Item", id, "input", store)
    return found


def _not_found(what: str, id: str, param: str, store: ResponseStore | None) -> InvalidValue:
    why = "this server stores nothing" if store is None else "it is not stored here, or no longer"
    return InvalidValue(
        f"{what} with id {id[:100]!r} not found: {why}; send the whole conversation as 'input'.", param=param
    )
