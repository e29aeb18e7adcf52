"""Encodes a typed task as the body of a request to /chat/completions or /completions.

Source: OpenAI's API description, and vLLM's names for fields it lacks, which most servers know or ignore.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.errors import InvalidValue, Unsupported
from shoal.pipelines.chat.turns import fold_instructions
from shoal.types import Generate, Guide, Message, Part, Sampling, Tool

_SAME_NAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "ignore_eos",
    "skip_special_tokens",
)
_LISTS = ("stop", "stop_token_ids", "bad_words")


def build_request(
    task: Generate,
    model: str,
    *,
    strip: Collection[str] = (),
    defaults: Mapping[str, Any],
    length_field: str = "max_tokens",
    names_tools: bool = True,
) -> tuple[str, bytes]:
    """Return the path and the body of a task for `model`.

    Fields in `strip` are omitted; `defaults` fill fields that the task does not set. A chat's `max_tokens` is sent as
    `length_field`. Without `names_tools`, a choice of one function becomes a required call with only that function.
    Raises InvalidValue for a mix of text and token id prompts, which one request cannot carry.
    """
    fields: dict[str, Any] = {"model": model}
    chat = not task.prompts
    if chat:
        messages = fold_instructions(task.messages) if task.folds_instructions else task.messages
        fields["messages"] = _merge_instructions([_message(message) for message in messages])
        fields |= _tool_fields(task, names_tools=names_tools)
        fields |= _template_fields(task)
    else:
        fields["prompt"] = _prompt(task)
    fields |= sampling_fields(task.sampling, chat=chat)
    fields |= _answer_fields(task)
    for name, value in [*task.extras.items(), *defaults.items()]:
        fields.setdefault(name, value)
    path = "/chat/completions" if chat else "/completions"
    for name in strip:
        fields.pop(name, None)
    if chat and "max_tokens" in fields:
        fields[length_field] = fields.pop("max_tokens")
    return path, msgspec.json.encode(fields)


def sampling_fields(sampling: Sampling, *, chat: bool) -> dict[str, Any]:
    """Return the sampling by wire names, without unset fields."""
    fields = {name: value for name in _SAME_NAME if (value := getattr(sampling, name)) is not None}
    fields |= {name: value for name in _LISTS if (value := getattr(sampling, name))}
    if sampling.include_stop is not None:
        fields["include_stop_str_in_output"] = sampling.include_stop
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None and chat:
        fields |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    elif sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    if sampling.guide is not None:
        fields |= _guide_fields(sampling.guide)
    return fields


def _guide_fields(guide: Guide) -> dict[str, Any]:
    if guide.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if guide.kind == "json_schema":
        schema: dict[str, Any] = {"name": guide.name or "answer", "schema": msgspec.Raw(guide.value.encode())}
        if guide.strict is not None:
            schema["strict"] = guide.strict
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if guide.kind == "structural_tag":
        return {"response_format": {"type": "structural_tag", **_decode_guide(guide)}}
    value = _decode_guide(guide) if guide.kind == "choice" else guide.value
    return {"structured_outputs": {guide.kind: value}}


def _decode_guide(guide: Guide) -> Any:
    try:
        return msgspec.json.decode(guide.value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidValue(f"{guide.kind}: not JSON: {error}", param="response_format") from None


def _answer_fields(task: Generate) -> dict[str, Any]:
    """Return the fields for the number and the form of answers."""
    fields: dict[str, Any] = {}
    if task.n != 1:
        fields["n"] = task.n
    if task.best_of is not None:
        fields["best_of"] = task.best_of
    if task.echo:
        fields["echo"] = True
    if task.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _template_fields(task: Generate) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if task.continue_final:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    elif not task.add_generation_prompt:
        fields["add_generation_prompt"] = False
    variables = dict(task.template_kwargs)
    effort = variables.pop("reasoning_effort", None)
    if effort is not None:
        fields["reasoning_effort"] = effort
    if variables:
        fields["chat_template_kwargs"] = variables
    if not task.include_reasoning:
        fields["include_reasoning"] = False
    return fields


def _tool_fields(task: Generate, *, names_tools: bool) -> dict[str, Any]:
    if not task.tools:
        return {}
    tools = task.tools
    as_required = task.tool_choice == "function" and not names_tools
    if as_required:
        tools = [tool for tool in tools if tool.name == task.tool_name]
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": _function(tool)} for tool in tools]}
    if as_required:
        fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    elif task.tool_choice == "function":
        fields["tool_choice"] = {"type": "function", "function": {"name": task.tool_name}}
    elif task.tool_choice != "auto":
        fields["tool_choice"] = task.tool_choice
    if not task.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields


def _function(tool: Tool) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool.name}
    if tool.description:
        fields["description"] = tool.description
    if tool.parameters:
        fields["parameters"] = tool.parameters
    if tool.strict:
        fields["strict"] = True
    return fields


def _merge_instructions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join system messages that follow each other: many chat templates accept one, at the beginning."""
    made: list[dict[str, Any]] = []
    for message in messages:
        text, before = _instructions(message), _instructions(made[-1]) if made else None
        if text is not None and before is not None:
            made[-1]["content"] = f"{before}\n\n{text}"
        else:
            made.append(message)
    return made


def _instructions(message: dict[str, Any]) -> str | None:
    """Return the text of a system message; None for other messages."""
    if message["role"] != "system":
        return None
    content = message["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content]
        content = None if None in texts else "\n\n".join(texts)
    return content if isinstance(content, str) else None


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    role = "system" if message.role == "developer" else message.role  # which only OpenAI's own models tell apart
    fields: dict[str, Any] = {"role": role, "content": content}
    if isinstance(content, list):
        fields["content"] = [_part(part) for part in content]
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    return fields


def _part(part: Part) -> dict[str, Any]:
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.url}}
    if part.type == "other":
        raise Unsupported(
            f"the model's server does not have this route, and Shoal cannot convert parts of type {part.kind!r}: send "
            "text and images, or use /v1/chat/completions",
            param="input",
        )
    return {"type": "text", "text": part.text}


def _prompt(task: Generate) -> Any:
    if len(task.prompts) == 1:
        return task.prompts[0]
    if len({isinstance(prompt, str) for prompt in task.prompts}) > 1:
        raise InvalidValue("prompts must be all texts or all token ids in one request: send two", param="prompt")
    return task.prompts
