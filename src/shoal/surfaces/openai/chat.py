"""Chat completions: converts a conversation to a task, and its chunks to OpenAI's replies and events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidValue
from shoal.http.json.extras import ExtrasDecoder, check_depth
from shoal.http.request import Reply, Request
from shoal.surfaces.openai import wire_chat as wire
from shoal.surfaces.openai.conversation import to_messages, to_tool, to_tool_selection, to_tools
from shoal.surfaces.openai.events import ENCODE, AnswerHeader, CompletionEvents, to_timings, to_usage, wants_usage
from shoal.surfaces.shared.generation import Answer, Choice, generate_reply
from shoal.surfaces.shared.logprobs import to_finite_logprob, token_bytes
from shoal.surfaces.shared.sampling import to_guide, to_sampling
from shoal.types import Chunk, Fields, Generate, TokenLogprob, ToolDelta, Usage

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

DIALECT = "openai.chat"
_ROLE = b'{"role":"assistant","content":""}'


class Chat:
    """The chat completions endpoint."""

    def __init__(self, gateway: Gateway, heartbeat_s: float) -> None:
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s
        self._decode: ExtrasDecoder[wire.ChatRequest] = ExtrasDecoder(wire.ChatRequest, "openai", "messages")

    async def __call__(self, request: Request) -> Reply:
        payload, fields, extras = await self._decode(request.body)
        model, adapter = self._gateway.resolve(payload.model or "")
        task = build_task(payload, model, adapter, raw=(DIALECT, fields), extras=extras)
        header = AnswerHeader.create(f"{model}:{adapter}" if adapter else model, "chatcmpl-")
        old = bool(payload.functions) and not payload.tools
        usage = wants_usage(payload)
        return await generate_reply(
            self._gateway,
            request,
            task,
            frames=partial(ChatEvents, header, request, choices=task.choices, include_usage=usage, old=old),
            body=partial(encode_body, header=header, logprobs=bool(payload.logprobs), old=old),
            heartbeat_s=self._heartbeat_s,
        )


def build_task(
    payload: wire.ChatRequest,
    model: str,
    adapter: str,
    *,
    raw: tuple[str, Fields] | None,
    extras: Fields,
) -> Generate:
    """Build the task. Raises InvalidValue, WrongType and Unsupported, with the field at fault."""
    tools = to_tools(payload.tools) or [to_tool(each, "functions") for each in payload.functions or ()]
    if payload.tool_choice is None and not payload.tools:
        mode, name = to_tool_selection(payload.function_call, tools, "function_call")
    else:
        mode, name = to_tool_selection(payload.tool_choice, tools, "tool_choice")
    most = payload.max_completion_tokens
    if most is None:
        most = payload.max_tokens
    if most == 0:
        field = "max_tokens" if payload.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidValue(f"'{field}' is 0; it must be at least 1.", param=field)
    return Generate(
        model=model,
        messages=to_messages(payload.messages),
        n=payload.n or 1,
        sampling=to_sampling(payload, max_tokens=most, logprobs=_requested_logprobs(payload), guide=to_guide(payload)),
        stream=bool(payload.stream),
        tools=tools,
        tool_choice=mode,
        tool_name=name,
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        continue_final=bool(payload.continue_final_message),
        add_generation_prompt=_adds_generation_prompt(payload),
        template_kwargs=_template_kwargs(payload),
        include_reasoning=payload.include_reasoning is not False,
        adapter=adapter,
        raw=raw,
        extras=extras,
    )


def _requested_logprobs(payload: wire.ChatRequest) -> int | None:
    if payload.logprobs:
        return payload.top_logprobs or 0
    if payload.top_logprobs:
        raise InvalidValue("'top_logprobs' requires 'logprobs': true.", param="top_logprobs")
    return None


def _adds_generation_prompt(payload: wire.ChatRequest) -> bool:
    """Whether the template begins a new answer. It does not if the last message is to be continued."""
    if not payload.continue_final_message:
        return payload.add_generation_prompt is not False
    if payload.add_generation_prompt:
        raise InvalidValue(
            "'continue_final_message' and 'add_generation_prompt' are mutually exclusive; send one of them.",
            param="continue_final_message",
        )
    return False


def _template_kwargs(payload: wire.ChatRequest) -> dict[str, Any]:
    kwargs = payload.chat_template_kwargs or {}
    check_depth(kwargs, "chat_template_kwargs")
    return kwargs if payload.reasoning_effort is None else {"reasoning_effort": payload.reasoning_effort, **kwargs}


def encode_body(answer: Answer, *, header: AnswerHeader, logprobs: bool, old: bool) -> bytes:
    """Encode the whole answer. `old` writes the call as `function_call`, the predecessor of `tool_calls`."""
    return ENCODE(
        wire.ChatCompletion(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[_to_choice(each, logprobs=logprobs, old=old) for each in answer.choices],
            usage=to_usage(answer.usage or Usage()),
            timings=to_timings(answer),
        )
    )


def _to_choice(choice: Choice, *, logprobs: bool, old: bool) -> wire.ChatChoice:
    message = wire.AnswerMessage(content=choice.text or (None if choice.tools else ""))
    if choice.reasoning:
        message.reasoning_content = choice.reasoning
    if choice.tools and old:
        called = choice.tools[0]
        message.function_call = wire.CalledFunction(name=called.name, arguments=called.arguments)
    elif choice.tools:
        message.tool_calls = [
            wire.CalledTool(id=each.id, function=wire.CalledFunction(name=each.name, arguments=each.arguments))
            for each in choice.tools
        ]
    return wire.ChatChoice(
        index=choice.index,
        message=message,
        logprobs=to_logprobs(choice.logprobs) if logprobs else None,
        finish_reason=_finish_reason(choice.finish_reason, old=old),
    )


def to_logprobs(tokens: list[TokenLogprob]) -> wire.ChatLogprobs:
    return wire.ChatLogprobs(
        content=[
            wire.ContentLogprob(
                token=each.token,
                logprob=to_finite_logprob(each.logprob),
                bytes=token_bytes(each),
                top_logprobs=[
                    wire.TopLogprob(token=top.token, logprob=to_finite_logprob(top.logprob), bytes=token_bytes(top))
                    for top in each.top
                ],
            )
            for each in tokens
        ]
    )


def _finish_reason(reason: str, *, old: bool) -> str:
    return "function_call" if old and reason == "tool_calls" else reason


class ChatEvents(CompletionEvents):
    """The events of a stream. Each choice begins with an event with its role, and ends with one with only the finish
    reason."""

    def __init__(
        self, header: AnswerHeader, request: Request, *, choices: int, include_usage: bool, old: bool = False
    ) -> None:
        super().__init__(header, "chat.completion.chunk", request, choices=choices, include_usage=include_usage)
        self._function_form = old
        self._texts: dict[int, bytes] = {}  # bytes before a text delta, by choice that has begun
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self.tail

    def encode_chunk(self, chunk: Chunk) -> bytes:
        before = self._texts.get(chunk.index) if chunk.raw is None else None
        if before is None or not chunk.text or _has_more(chunk):
            return super().encode_chunk(chunk)
        self._pieces += 1
        return before + ENCODE(chunk.text) + self._plain_tail

    def _encode_choice_chunk(self, chunk: Chunk) -> bytes:
        index = chunk.index
        events: list[bytes] = []
        if index not in self._texts:
            self._texts[index] = b'%b{"index":%d,"delta":{"content":' % (self.head, index)
            events.append(self._encode_event(index, _ROLE))
        deltas = self._encode_deltas(chunk)
        if deltas:
            logprobs = ENCODE(to_logprobs(chunk.logprobs)) if chunk.logprobs else b"null"
            events += [self._encode_event(index, delta) for delta in deltas[:-1]]
            events.append(self._encode_event(index, deltas[-1], logprobs))
        if chunk.finish_reason is not None:
            reason = ENCODE(_finish_reason(chunk.finish_reason, old=self._function_form))
            events.append(self.finish_choice(self._encode_event(index, b"{}", reason=reason)))
        return b"".join(events)

    def _encode_deltas(self, chunk: Chunk) -> list[bytes]:
        deltas = []
        if chunk.reasoning:
            deltas.append(b'{"reasoning_content":%b}' % ENCODE(chunk.reasoning))
        if chunk.text:
            deltas.append(b'{"content":%b}' % ENCODE(chunk.text))
        if chunk.tools and self._function_form:
            deltas += [_encode_function_delta(each) for each in chunk.tools if each.index == 0]
        elif chunk.tools:
            # Client libraries assume one fragment per event.
            deltas += [b'{"tool_calls":[%b]}' % _encode_tool_delta(each) for each in chunk.tools]
        if chunk.logprobs and not deltas:
            deltas.append(b'{"content":""}')  # for a token whose text is still held back
        return deltas

    def _encode_event(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self.head + choice + self.tail


def _has_more(chunk: Chunk) -> bool:
    """Whether the chunk has anything besides text."""
    return bool(
        chunk.finish_reason is not None or chunk.logprobs or chunk.tools or chunk.reasoning or chunk.usage is not None
    )


def _encode_tool_delta(delta: ToolDelta) -> bytes:
    if not delta.id and not delta.name:
        return b'{"index":%d,"function":{"arguments":%b}}' % (delta.index, ENCODE(delta.arguments))
    return b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}' % (
        delta.index,
        ENCODE(delta.id),
        ENCODE(delta.name),
        ENCODE(delta.arguments),
    )


def _encode_function_delta(delta: ToolDelta) -> bytes:
    name = b'"name":%b,' % ENCODE(delta.name) if delta.name else b""
    return b'{"function_call":{%b"arguments":%b}}' % (name, ENCODE(delta.arguments))
