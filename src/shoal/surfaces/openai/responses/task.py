"""Build the task of a request: what a model that knows only conversations and functions can be told of it."""

from __future__ import annotations

import msgspec

from shoal.errors import RequestError
from shoal.surfaces.openai.responses import wire
from shoal.surfaces.openai.responses.history import History, read_history
from shoal.surfaces.openai.responses.items import to_messages
from shoal.surfaces.openai.responses.options import (
    refuse_foreign_state,
    refuse_unsupported,
    to_chat_fields,
    to_sampling,
)
from shoal.surfaces.openai.responses.store import ResponseStore
from shoal.surfaces.openai.responses.tools import Tools
from shoal.types import Fields, Generate, Message, Untranslated

DIALECT = "openai.responses"
NOT_PASSED_ON = ""
"""The dialect of a body that refers to what only this process stores."""


class Translation(msgspec.Struct):
    """A task, and what is needed to answer it in the client's terms."""

    task: Generate
    tools: Tools
    history: History


def translate(
    payload: wire.ResponsesRequest,
    model: tuple[str, str],
    fields: Fields,
    extras: Fields,
    *,
    store: ResponseStore | None,
    owner: str,
) -> Translation:
    """Translate a request for a (model, adapter). What cannot be translated is not an error yet, since the model's
    server may speak this API itself. Raises InvalidValue, WrongType and Unsupported for what no server can do."""
    refuse_unsupported(payload)
    effort = payload.reasoning.effort if payload.reasoning is not None else None
    task = Generate(
        model=model[0],
        sampling=to_sampling(payload),
        stream=bool(payload.stream),
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        adapter=model[1],
        raw=(DIALECT, fields),
        extras=to_chat_fields(payload, fields, extras),
        drop_oldest=payload.truncation == "auto",
    )
    try:
        return _translate_conversation(payload, task, store, owner)
    except RequestError as error:
        why = Untranslated(message=error.message, param=error.param, kind=error.kind)
        nothing = [Message(role="user", content="")]
        task = msgspec.structs.replace(task, messages=nothing, untranslated=why)
        return Translation(task, Tools(), History(payload.input))


def _translate_conversation(
    payload: wire.ResponsesRequest, task: Generate, store: ResponseStore | None, owner: str
) -> Translation:
    refuse_foreign_state(payload)
    history = read_history(payload, store, owner)
    tools = Tools()
    tools.add(payload.tools or ())
    messages = to_messages(history.items, payload.instructions, tools)
    selection = tools.select(payload.tool_choice)
    assert task.raw is not None
    task = msgspec.structs.replace(
        task,
        messages=messages,
        tools=tools.functions,
        tool_choice=selection.mode,
        tool_name=selection.name,
        raw=(NOT_PASSED_ON, task.raw[1]) if history.is_stored else task.raw,
    )
    return Translation(task, tools, history)
