"""Convert the fields of a request beside its conversation. Raises RequestErrors that name the field."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from shoal.errors import InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import to_json_bytes
from shoal.surfaces.openai.events import ENCODE, AnswerHeader
from shoal.surfaces.openai.responses import wire, wire_output
from shoal.surfaces.shared.sampling import schema_guide
from shoal.types import Fields, Guide, Sampling

_LOGPROBS = "message.output_text.logprobs"
_CHAT_FIELDS = (
    "metadata",
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that chat completions have under the same name."""

_ECHOED = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "top_logprobs")


def refuse_unsupported(payload: wire.ResponsesRequest) -> None:
    """Refuse what no server behind can do for Shoal. Raises Unsupported and InvalidValue."""
    if payload.background:
        raise Unsupported(
            "'background' is not supported: this server runs nothing without its client; omit it, and wait for the "
            "answer or set 'stream' to true.",
            param="background",
        )
    if payload.max_output_tokens == 0:
        raise InvalidValue("'max_output_tokens' is 0; it must be at least 1.", param="max_output_tokens")


def refuse_foreign_state(payload: wire.ResponsesRequest) -> None:
    """Refuse references to objects that only servers with this API have. Raises Unsupported."""
    for name, value in (("conversation", payload.conversation), ("prompt", payload.prompt)):
        if to_json_bytes(value) is not None:
            raise Unsupported(
                f"'{name}' is not supported: this server stores no such objects; send the whole conversation as "
                "'input', or go on from a 'previous_response_id'.",
                param=name,
            )


def to_sampling(payload: wire.ResponsesRequest) -> Sampling:
    logprobs = payload.top_logprobs
    if logprobs is None and _LOGPROBS in (payload.include or ()):
        logprobs = 0
    return Sampling(
        max_tokens=None if payload.max_output_tokens == -1 else payload.max_output_tokens,
        temperature=payload.temperature,
        top_p=payload.top_p,
        logprobs=logprobs,
        guide=_to_guide(payload.text),
    )


def _to_guide(text: wire.TextOptions | None) -> Guide | None:
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guide(kind="json_object", field="text")
    guide = schema_guide(to_json_bytes(form.schema), "text.format.schema")
    if guide is None:
        raise WrongType("'text.format.schema' is missing; send the schema of the answer.", param="text")
    return msgspec.structs.replace(guide, field="text", name=form.name or "", strict=form.strict)


def to_chat_fields(payload: wire.ResponsesRequest, fields: Fields, extras: Fields) -> Fields:
    """Return the fields that a server of chat completions gets as they came: those that both APIs have, and unknown
    ones."""
    made = {name: fields[name] for name in _CHAT_FIELDS if name in fields and bytes(fields[name]) != b"null"}
    if payload.text is not None and payload.text.verbosity is not None:
        made["verbosity"] = msgspec.Raw(ENCODE(payload.text.verbosity))
    return {**extras, **made}


def start_response(
    payload: wire.ResponsesRequest, fields: Fields, header: AnswerHeader, *, stores: bool
) -> wire_output.Response:
    """Build the initial response: the request's fields, without any of the answer."""
    reasoning = payload.reasoning or wire.ReasoningOptions()
    return wire_output.Response(
        id=header.id,
        created_at=header.created,
        status="in_progress",
        instructions=payload.instructions,
        max_output_tokens=payload.max_output_tokens,
        metadata=payload.metadata or {},
        model=header.model,
        output=[],
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        previous_response_id=payload.previous_response_id,
        reasoning={"effort": reasoning.effort, "summary": reasoning.get_summary()},
        store=stores,
        temperature=payload.temperature,
        text=_to_text(payload.text),
        tool_choice=fields["tool_choice"] if payload.tool_choice else "auto",
        tools=cast(list[Any], fields["tools"]) if payload.tools else [],
        top_p=payload.top_p,
        truncation=payload.truncation or "disabled",
        user=payload.user,
        **{name: value for name in _ECHOED if (value := getattr(payload, name)) is not None},
    )


def _to_text(text: wire.TextOptions | None) -> dict[str, Any]:
    made: dict[str, Any] = {"format": {"type": "text"}}
    if text is not None and text.format is not None:
        made["format"] = _to_plain(text.format)
    if text is not None and text.verbosity is not None:
        made["verbosity"] = text.verbosity
    return made


def _to_plain(value: Any) -> Any:
    """Convert to plain JSON values, without null fields."""
    plain = cast(dict[str, Any], msgspec.json.decode(ENCODE(value)))
    return {name: each for name, each in plain.items() if each is not None}
