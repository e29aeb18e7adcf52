"""OpenAI's responses without stored state: converts items to a task, and its chunks to items and typed events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shoal.errors import EmptyInput, InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import ArgumentsLimit, ExtrasDecoder, to_json_bytes
from shoal.http.request import Reply, Request
from shoal.surfaces.openai import wire_chat
from shoal.surfaces.openai import wire_responses as wire
from shoal.surfaces.openai.conversation import ToolSelection, to_content, to_tool, to_tool_selection
from shoal.surfaces.openai.events import ENCODE, AnswerHeader
from shoal.surfaces.openai.response_events import ResponseEvents, encode_body
from shoal.surfaces.shared.generation import generate_reply
from shoal.surfaces.shared.sampling import schema_guide
from shoal.surfaces.shared.wire_conversations import MAX_CALLS
from shoal.types import Fields, Generate, Guide, Message, Sampling, Tool, ToolCall

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

DIALECT = "openai.responses"
_ROLES = frozenset({"developer", "system", "user", "assistant"})
_LOGPROBS = "message.output_text.logprobs"


class Responses:
    """The responses endpoint."""

    def __init__(self, gateway: Gateway, heartbeat_s: float) -> None:
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s
        self._decode: ExtrasDecoder[wire.ResponsesRequest] = ExtrasDecoder(wire.ResponsesRequest, "openai", "input")

    async def __call__(self, request: Request) -> Reply:
        payload, fields, extras = await self._decode(request.body)
        model, adapter = self._gateway.resolve(payload.model or "")
        task = build_task(payload, model, adapter, raw=(DIALECT, fields), extras=extras)
        header = AnswerHeader.create(f"{model}:{adapter}" if adapter else model, "resp_")
        begun = start_response(payload, header)
        return await generate_reply(
            self._gateway,
            request,
            task,
            frames=partial(ResponseEvents, begun, request),
            body=partial(encode_body, begun),
            heartbeat_s=self._heartbeat_s,
        )


def build_task(
    payload: wire.ResponsesRequest,
    model: str,
    adapter: str,
    *,
    raw: tuple[str, Fields],
    extras: Fields,
) -> Generate:
    """Build the task. Raises EmptyInput, InvalidValue, WrongType and Unsupported, with the field at fault."""
    _refuse_stored_state(payload)
    if payload.max_output_tokens == 0:
        raise InvalidValue("'max_output_tokens' is 0; it must be at least 1.", param="max_output_tokens")
    tools = [_to_tool(each, at) for at, each in enumerate(payload.tools or ())]
    mode, name = _to_tool_selection(payload.tool_choice, tools)
    logprobs = payload.top_logprobs
    if logprobs is None and _LOGPROBS in (payload.include or ()):
        logprobs = 0
    effort = payload.reasoning.effort if payload.reasoning is not None else None
    return Generate(
        model=model,
        messages=to_messages(payload),
        sampling=Sampling(
            max_tokens=None if payload.max_output_tokens == -1 else payload.max_output_tokens,
            temperature=payload.temperature,
            top_p=payload.top_p,
            logprobs=logprobs,
            guide=_to_guide(payload.text),
        ),
        stream=bool(payload.stream),
        tools=tools,
        tool_choice=mode,
        tool_name=name,
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        adapter=adapter,
        raw=raw,
        extras=extras,
    )


def _refuse_stored_state(payload: wire.ResponsesRequest) -> None:
    """Refuse fields that refer to stored state, and automatic truncation. Raises Unsupported."""
    refused = {
        "previous_response_id": payload.previous_response_id is not None,
        "conversation": to_json_bytes(payload.conversation) is not None,
        "prompt": to_json_bytes(payload.prompt) is not None,
    }
    for name, given in refused.items():
        if given:
            raise Unsupported(
                f"'{name}' is not supported: this server stores nothing; send the whole conversation as 'input'.",
                param=name,
            )
    if payload.background:
        raise Unsupported(
            "'background' is not supported: this server stores no answers; omit it, and wait for the answer or set "
            "'stream' to true.",
            param="background",
        )
    if payload.truncation == "auto":
        raise Unsupported("'truncation' is set by the operator; send disabled, or omit it.", param="truncation")


def to_messages(payload: wire.ResponsesRequest) -> list[Message]:
    messages = [Message(role="system", content=payload.instructions)] if payload.instructions else []
    if not payload.input:
        raise EmptyInput("'input' is empty; send a text, or at least one item.", param="input")
    if isinstance(payload.input, str):
        return [*messages, Message(role="user", content=payload.input)]
    thought, arguments = "", ArgumentsLimit("input")
    for at, item in enumerate(payload.input):
        where = f"input[{at}]"
        kind = item.type or ("message" if item.role is not None else "")
        match kind:
            case "message":
                messages.append(_to_message(item, where, thought))
                thought = ""
            case "function_call":
                _add_call(messages, _to_call(item, where, arguments), thought)
                thought = ""
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise WrongType(f"'{where}' needs 'call_id' and 'output'.", param="input")
                content = to_content(item.output, f"{where}.output")
                messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else []
                thought = "".join(part.text or "" for part in parts)
            case _:
                raise Unsupported(
                    f"'{where}' is of type {kind[:64]!r}; send messages, function calls and their outputs.",
                    param="input",
                )
    return messages


def _to_message(item: wire.InputItem, where: str, thought: str) -> Message:
    if item.role not in _ROLES or item.content is None:
        raise WrongType(f"'{where}' needs a 'role' ({', '.join(sorted(_ROLES))}) and 'content'.", param="input")
    reasoning = thought if thought and item.role == "assistant" else None
    return Message(role=item.role, content=to_content(item.content, f"{where}.content"), reasoning=reasoning)


def _to_call(item: wire.InputItem, where: str, arguments: ArgumentsLimit) -> ToolCall:
    if item.call_id is None or not item.name:
        raise WrongType(f"'{where}' needs 'call_id', 'name' and 'arguments'.", param="input")
    return ToolCall(id=item.call_id, name=item.name, arguments=arguments.check(item.arguments or ""))


def _add_call(messages: list[Message], call: ToolCall, thought: str) -> None:
    """Add a call to its assistant turn: here calls are separate items, not part of a message."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and not thought:
        last.tool_calls.append(call)  # safe to change: this module made the message
        if len(last.tool_calls) > MAX_CALLS:
            raise InvalidValue(
                f"'input' has more than {MAX_CALLS} function calls in one turn; send their outputs after "
                "them, or remove some.",
                param="input",
            )
    else:
        messages.append(Message(role="assistant", tool_calls=[call], reasoning=thought or None))


def _to_tool(tool: wire.ResponseTool, at: int) -> Tool:
    if tool.type != "function":
        raise Unsupported(f"'tools[{at}]' is of type {tool.type[:64]!r}; only functions are supported.", param="tools")
    if not tool.name:
        raise WrongType(f"Missing required field 'tools[{at}].name'.", param="tools")
    return to_tool(tool.to_definition(), "tools")


def _to_tool_selection(choice: str | wire.ResponseToolName | None, tools: list[Tool]) -> ToolSelection:
    if not isinstance(choice, wire.ResponseToolName):
        return to_tool_selection(choice, tools, "tool_choice")
    name = wire_chat.FunctionName(name=choice.name or "")
    return to_tool_selection(wire_chat.NamedTool(type=choice.type, function=name), tools, "tool_choice")


def _to_guide(text: wire.TextOptions | None) -> Guide | None:
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guide(kind="json_object", field="text")
    guide = schema_guide(to_json_bytes(form.schema), "text.format.schema")
    if guide is None:
        raise WrongType("'text.format.schema' is missing; send the schema of the answer.", param="text")
    return msgspec.structs.replace(guide, field="text")


def start_response(payload: wire.ResponsesRequest, header: AnswerHeader) -> wire.Response:
    """Build the initial response: the request's fields, without any of the answer."""
    tools: list[Any] = [
        {
            "type": "function",
            "name": each.name,
            "description": each.description,
            "parameters": each.parameters or {},
            "strict": bool(each.strict),
        }
        for each in payload.tools or ()
    ]
    form = payload.text.format if payload.text is not None and payload.text.format is not None else None
    chosen: Any = payload.tool_choice or "auto"
    effort = payload.reasoning.effort if payload.reasoning is not None else None
    return wire.Response(
        id=header.id,
        created_at=header.created,
        status="in_progress",
        instructions=payload.instructions,
        max_output_tokens=payload.max_output_tokens,
        metadata=payload.metadata or {},
        model=header.model,
        output=[],
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        reasoning={"effort": effort, "summary": None},
        temperature=payload.temperature,
        text={"format": _to_plain(form) if form is not None else {"type": "text"}},
        tool_choice=_to_plain(chosen),
        tools=tools,
        top_p=payload.top_p,
        user=payload.user,
    )


def _to_plain(value: Any) -> Any:
    """Convert to plain JSON values, without null fields."""
    if isinstance(value, str):
        return value
    plain = cast(dict[str, Any], msgspec.json.decode(ENCODE(value)))
    return {name: each for name, each in plain.items() if each is not None}
