"""Convert Ollama's requests to tasks: messages, options, formats and durations. Raises RequestErrors that name the
field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shoal.core.generation.sampling import is_neutral
from shoal.durations import parse_duration
from shoal.errors import InvalidValue, Unsupported
from shoal.http.json.decoder import to_request_error
from shoal.http.json.extras import check_depth
from shoal.sampling_fields import FIELDS_OF_OTHER_APIS, UNSUPPORTED_FIELDS
from shoal.surfaces.ollama import wire
from shoal.types import Generate, Guide, Message, Part, Sampling, Tool, ToolCall

_JSON = msgspec.json.Encoder()
_NAMES = {"repetition_penalty": "repeat_penalty"}
_LEVELS = ("low", "medium", "high", "max")
_MAX_SHOWN = 64
UNSUPPORTED_OPTIONS = {
    name: neutral
    for name, neutral in {**UNSUPPORTED_FIELDS, **FIELDS_OF_OTHER_APIS}.items()
    if name not in wire.OllamaOptions.__struct_fields__
}
"""Options that no model here, or not Ollama's API, supports, with the values that have no effect."""

_OPTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)

# The first base64 characters of each file type.
_IMAGES = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "UklGR": "webp", "R0lGOD": "gif"}


def parse_extras(raw: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    """Return those of the raw `options` that are in UNSUPPORTED_OPTIONS and would change the answer. Only a remote
    server may support them; it does not receive those without effect, which it may reject. Raises Malformed."""
    try:
        options = (_OPTIONS.decode(raw) if raw is not None else None) or {}
    except UnicodeDecodeError as error:  # in the name of an option
        raise to_request_error(error, bytes(raw or b"")) from None
    return {
        name: options[name]
        for name in options.keys() & UNSUPPORTED_OPTIONS.keys()
        if not is_neutral(options[name], UNSUPPORTED_OPTIONS[name])
    }


def chat_task(
    payload: wire.OllamaChatRequest, model: str, adapter: str, *, stream: bool, extras: dict[str, msgspec.Raw]
) -> Generate:
    """Build the task of a conversation with at least one message."""
    return Generate(
        model=model,
        adapter=adapter,
        messages=_to_messages(payload.messages or []),
        sampling=_to_sampling(payload),
        names=_NAMES,
        extras=extras,
        stream=stream,
        tools=[_to_tool(each) for each in payload.tools or []],
        template_kwargs=_thinking_kwargs(payload.think),
        include_reasoning=payload.think is not False,
    )


def generate_task(
    payload: wire.OllamaGenerateRequest, model: str, adapter: str, *, stream: bool, extras: dict[str, msgspec.Raw]
) -> Generate:
    """Build the task of a prompt: a conversation of one turn, or the unchanged prompt with `raw`."""
    _check_generate(payload)
    messages = []
    if not payload.raw:
        if payload.system:
            messages.append(Message(role="system", content=payload.system))
        messages.append(Message(role="user", content=_to_content(payload.prompt or "", payload.images, "images")))
    return Generate(
        model=model,
        adapter=adapter,
        prompts=[payload.prompt or ""] if payload.raw else [],
        messages=messages,
        sampling=_to_sampling(payload),
        names=_NAMES,
        extras=extras,
        stream=stream,
        template_kwargs=_thinking_kwargs(payload.think),
        include_reasoning=payload.think is not False,
    )


def parse_keep_alive(keep_alive: float | str | None) -> float | None:
    """Parse a `keep_alive` into seconds; negative values mean infinity. Raises InvalidValue."""
    if keep_alive is None:
        return None
    found = parse_duration(keep_alive) if isinstance(keep_alive, str) else keep_alive
    if found is None:
        raise InvalidValue(
            f'\'keep_alive\' is {str(keep_alive)[:_MAX_SHOWN]!r}; send seconds, or a duration such as "5m" or "1h30m".',
            param="keep_alive",
        )
    return float("inf") if found < 0 else found


def _check_generate(payload: wire.OllamaGenerateRequest) -> None:
    if payload.suffix:
        raise Unsupported("'suffix' is not supported: put the text to complete into the prompt.", param="suffix")
    if payload.raw and (payload.system or payload.template or payload.context):
        raise InvalidValue("raw mode does not support template, system, or context; leave them out.", param="raw")
    if payload.template:
        raise Unsupported("'template' is not supported: send a fully rendered prompt, with raw=true.", param="template")
    if payload.context:
        raise Unsupported("'context' is not supported: send the earlier turns to /api/chat.", param="context")
    if payload.raw and payload.images:
        raise Unsupported("'images' are not supported with raw=true: omit one of the two.", param="images")


# Messages


def _to_messages(messages: Sequence[wire.OllamaMessage]) -> list[Message]:
    open_calls: list[ToolCall] = []
    made, count = [], 0
    for at, each in enumerate(messages):
        calls = []
        for call in each.tool_calls or []:
            count += 1
            # Nine letters and digits: the templates of some models refuse any other id.
            ident = call.id or f"call{count:05d}"
            check_depth(call.function.arguments or {}, "messages")
            arguments = _JSON.encode(call.function.arguments or {}).decode()
            calls.append(ToolCall(id=ident, name=call.function.name, arguments=arguments))
        open_calls += calls
        role = each.role.lower()
        answered = each.tool_call_id or (_match_call(open_calls, each.tool_name) if role == "tool" else None)
        open_calls = [call for call in open_calls if call.id != answered]
        content = _to_content(each.content or "", each.images, f"messages[{at}].images")
        made.append(
            Message(
                role=role,
                content=None if calls and not content else content,
                name=each.tool_name or None,
                tool_calls=calls,
                tool_call_id=answered,
                reasoning=each.thinking or None,
            )
        )
    return made


def _match_call(calls: Sequence[ToolCall], name: str | None) -> str | None:
    """Return the id of the call that a result without an id answers: the first open one of that name, else the first
    open one."""
    named = [call.id for call in calls if call.name == name]
    return next(iter(named or [call.id for call in calls]), None)


def _to_content(text: str, images: Sequence[str] | None, where: str) -> str | list[Part]:
    if not images:
        return text
    parts = [Part(type="image", url=_to_url(image, f"{where}[{at}]")) for at, image in enumerate(images)]
    return [*parts, Part(text=text)] if text else parts


def _to_url(image: str, where: str) -> str:
    if image.startswith("data:image/"):
        return image
    kind = next((kind for head, kind in _IMAGES.items() if image.startswith(head)), None)
    if kind is None:
        raise InvalidValue(
            f"'{where}' is not the base64 of a PNG, JPEG, WebP or GIF file; send one.",
            param=where.partition("[")[0],
        )
    return f"data:image/{kind};base64,{image}"


def _to_tool(tool: wire.OllamaTool) -> Tool:
    of = tool.function
    check_depth(of.parameters or {}, "tools")
    return Tool(name=of.name, description=of.description or "", parameters=of.parameters or {})


# Sampling


def _to_sampling(payload: wire.OllamaChatRequest | wire.OllamaGenerateRequest) -> Sampling:
    options = payload.options or wire.OllamaOptions()
    top_k, seed = _to_int(options.top_k), _to_int(options.seed)
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return Sampling(
        max_tokens=_positive_or_none(_to_int(options.num_predict)),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=top_k if top_k is None or top_k > 0 else -1,
        min_p=options.min_p,
        seed=None if seed is None or seed < 0 else seed,
        stop=[text for text in stop if text],
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repeat_penalty,
        logprobs=(payload.top_logprobs or 0) if payload.logprobs else None,
        guide=_to_guide(payload.format),
    )


def _to_int(number: float | None) -> int | None:
    return None if number is None else int(number)


def _positive_or_none(number: int | None) -> int | None:
    """Return None for -1 (no limit), -2 (fill the context) and 0, which leaves the length to the model and its
    context."""
    return number if number is not None and number > 0 else None


def _to_guide(value: str | dict[str, Any] | None) -> Guide | None:
    match value:
        case None | "":
            return None
        case "json":
            return Guide(kind="json_object", field="format")
        case dict():
            check_depth(value, "format")
            return Guide(kind="json_schema", value=_JSON.encode(value).decode(), field="format")
        case _:
            raise InvalidValue("'format' is neither \"json\" nor a JSON schema; send one of the two.", param="format")


def _thinking_kwargs(think: bool | str | None) -> dict[str, Any]:
    """Return the template variables for `think`, under the names that templates of thinking models read."""
    match think:
        case None | "":
            return {}
        case bool():
            return {"enable_thinking": think}
        case _ if think in _LEVELS:
            return {"enable_thinking": True, "reasoning_effort": "high" if think == "max" else think}
        case _:
            raise InvalidValue(
                f"'think' is {think[:_MAX_SHOWN]!r}; send true, false, {_join_words(_LEVELS)}.",
                param="think",
            )


def _join_words(words: Iterable[str]) -> str:
    *most, last = (f'"{word}"' for word in words)
    return f"{', '.join(most)} or {last}"
