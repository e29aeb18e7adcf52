"""Tasks of language models from the arguments of a Python call: OpenAI's fields, checked as the server checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

import msgspec
import pybase64

from shoal.decoding import json_decoder
from shoal.errors import InvalidValue, WrongType
from shoal.http.json.decoder import to_request_error
from shoal.python.arguments import text_ids_or_image, text_of
from shoal.python.images import ImageInput, check_head, media_type, read_image_file, to_image
from shoal.surfaces.openai import chat, completions
from shoal.surfaces.openai.wire_chat import ChatRequest, CompletionRequest
from shoal.types import Generate, TextItem

T = TypeVar("T")

Messages: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""A conversation: one user's text, or OpenAI's messages, whose `content` may be a list of texts and images."""


class SamplingOptions(TypedDict, total=False):
    """OpenAI's fields, and from `top_k` on vLLM's; None is the model's own default. `response_format`: OpenAI's object,
    or a JSON schema."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None
    response_format: Mapping[str, Any] | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None


class GenerateOptions(SamplingOptions, total=False):
    """Options of `generate`. `logprobs`: how many of the likeliest tokens to report beside the chosen one."""

    logprobs: int | None


class ChatOptions(SamplingOptions, total=False):
    """Options of `chat`. `tools` and `tool_choice` are OpenAI's objects."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None


_FORMATS = {"text", "json_object", "json_schema", "structural_tag"}
_SHAPES: dict[type, Any] = {ChatRequest: json_decoder(ChatRequest), CompletionRequest: json_decoder(CompletionRequest)}


def build_chat(messages: Messages, model: str, options: ChatOptions, *, stream: bool) -> Generate:
    """Return the task; reads image files. Raises TypeError for an option that there is not, and RequestErrors that name
    the field."""
    _check_names("chat", options, ChatOptions)
    payload = _decode(ChatRequest, {**options, "messages": _to_wire(messages)}, model, stream)
    return chat.build_task(payload, model, "", raw=None, extras={})


def build_generate(prompt: TextItem, model: str, options: GenerateOptions, *, stream: bool) -> Generate:
    """As `build_chat`, for a text, or its token ids, to continue."""
    _check_names("generate", options, GenerateOptions)
    text = text_ids_or_image(prompt, "prompt")
    if not isinstance(text, str | list):
        raise WrongType("prompt must be a text or a list of token ids: send images with chat", param="prompt")
    limit = {"max_tokens": -1 if options.get("max_tokens") is None else options["max_tokens"]}
    payload = _decode(CompletionRequest, {**options, **limit, "prompt": text}, model, stream)
    return completions.build_task(payload, [text], model, "", raw=None, extras={})


def _check_names(method: str, options: Mapping[str, Any], known: Any) -> None:
    for name in options:
        if name not in known.__annotations__:
            raise TypeError(f"{method}() has no option {name!r}; its options are: {', '.join(known.__annotations__)}")


def _decode(kind: type[T], fields: dict[str, Any], model: str, stream: bool) -> T:
    form = fields.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in _FORMATS:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    try:
        body = msgspec.json.encode({**fields, "model": model, "stream": stream}, enc_hook=_to_plain)
    except UnicodeEncodeError:
        raise InvalidValue(
            "a text contains half of a surrogate pair, which is not valid text: decode it with errors='replace'"
        ) from None
    try:
        found: T = _SHAPES[kind].decode(body)
    except msgspec.DecodeError as error:
        raise to_request_error(error, body) from None
    return found


def _to_plain(value: object) -> object:
    """Encode what JSON has no form for: other mappings, and numbers and arrays of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise WrongType(f"a message or option contains a {type(value).__name__}: pass what JSON can hold")


def _to_wire(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": text_of(messages, "messages")}]
    if not isinstance(messages, Sequence):
        raise WrongType(
            f"messages must be a text or a list of messages, not {type(messages).__name__}", param="messages"
        )
    return [_to_message(each, f"messages[{at}]") for at, each in enumerate(messages)]


def _to_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise WrongType(f"{name} must be a dict with role and content, not {type(message).__name__}", param="messages")
    if "images" in message:
        raise WrongType(f"{name} has images: put them into the list of its content", param="messages")
    made = dict(message)
    content = made.get("content")
    if isinstance(content, list | tuple) or to_image(content) is not None:
        parts = content if isinstance(content, list | tuple) else [content]
        made["content"] = [_to_part(each, f"{name}.content[{at}]") for at, each in enumerate(parts)]
    return made


def _to_part(part: str | Mapping[str, Any] | ImageInput, name: str) -> Mapping[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": text_of(part, name)}
    if isinstance(part, Mapping):
        return part
    image = to_image(part)
    if image is None:
        raise WrongType(
            f"{name} must be a text, an image or a dict of OpenAI's, not {type(part).__name__}", param="messages"
        )
    data = (read_image_file(image) if isinstance(image, Path) else image).data
    check_head(data, name)
    url = f"data:{media_type(data)};base64,{pybase64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
