"""Legacy completions: converts prompts to a task, and its chunks to OpenAI's replies and events."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shoal.errors import EmptyInput, InvalidValue, RequestError, TooManyInputs, Unsupported, WrongType
from shoal.http.json.decoder import FieldError
from shoal.http.json.extras import ExtrasDecoder
from shoal.http.json.refused import UnreadField, is_set
from shoal.http.request import Reply, Request
from shoal.surfaces.openai import wire_chat as wire
from shoal.surfaces.openai.chat import Chat
from shoal.surfaces.openai.events import ENCODE, AnswerHeader, CompletionEvents, to_timings, to_usage, wants_usage
from shoal.surfaces.shared.generation import Answer, Choice, generate_reply
from shoal.surfaces.shared.logprobs import to_finite_logprob
from shoal.surfaces.shared.sampling import to_guide, to_sampling
from shoal.types import Chunk, Fields, Generate, TextItem, TokenLogprob, Usage

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

DIALECT = "openai.completions"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for requests without `max_tokens`."""

MAX_CHOICES = 2048
"""Maximum answers that one request may generate: prompts times `n` or `best_of`, whichever is larger."""


class Completions:
    """The completions endpoint. `chat` serves bodies with `messages` and no `prompt`, as triton-openai does here."""

    def __init__(self, gateway: Gateway, heartbeat_s: float, max_inputs: int, chat: Chat) -> None:
        self._gateway = gateway
        self._chat = chat
        self._heartbeat_s = heartbeat_s
        self._max_inputs = max_inputs
        self._decode: ExtrasDecoder[wire.CompletionRequest] = ExtrasDecoder(
            wire.CompletionRequest, "openai", "prompt", max_inputs
        )

    async def __call__(self, request: Request) -> Reply:
        try:
            payload, fields, extras = await self._decode(request.body)
        except FieldError as error:
            if not (error.missing and error.at == "prompt" and has_messages(request.body)):
                raise
            return await self._chat(request)
        prompts = parse_prompts(payload.prompt, self._max_inputs)
        model, adapter = self._gateway.resolve(payload.model or "")
        task = build_task(payload, prompts, model, adapter, raw=(DIALECT, fields), extras=extras)
        header = AnswerHeader.create(f"{model}:{adapter}" if adapter else model, "cmpl-")
        usage = wants_usage(payload)
        try:
            return await generate_reply(
                self._gateway,
                request,
                task,
                frames=partial(TextEvents, header, request, choices=task.choices, include_usage=usage),
                body=partial(encode_body, header=header, logprobs=payload.logprobs is not None),
                heartbeat_s=self._heartbeat_s,
            )
        except RequestError as error:  # engines use the field name of chat completions
            if error.param != "top_logprobs":
                raise
            raise InvalidValue(
                "'logprobs' above 0 is not supported: this model returns only the probability of the chosen token; "
                "send 0, or omit it.",
                param="logprobs",
            ) from error


class _Shape(msgspec.Struct):
    messages: UnreadField = msgspec.UNSET


_SHAPE = msgspec.json.Decoder(_Shape)


def has_messages(body: bytes) -> bool:
    """Whether a JSON body has `messages`."""
    return is_set(_SHAPE.decode(body).messages)


def parse_prompts(prompts: str | list[Any], limit: int) -> list[TextItem]:
    """Parse prompts: texts or lists of token ids, one entry each. One bare list of ids is one prompt.

    Raises EmptyInput, WrongType and TooManyInputs.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise EmptyInput("'prompt' is an empty list; send at least one text.", param="prompt")
    kinds = set(map(type, prompts))
    if len(kinds) > 1:
        raise WrongType("'prompt' mixes texts and token ids; send one kind per request.", param="prompt")
    if int in kinds:
        prompts = [prompts]
    if len(prompts) > limit:
        raise TooManyInputs(f"'prompt' has more than {limit} entries; split the request.", param="prompt")
    if list in kinds and not all(prompts):
        at = next(at for at, each in enumerate(prompts) if not each)
        raise EmptyInput(f"'prompt[{at}]' is an empty list; omit it or send token ids.", param="prompt")
    return cast(list[TextItem], prompts)


def build_task(
    payload: wire.CompletionRequest,
    prompts: list[TextItem],
    model: str,
    adapter: str,
    *,
    raw: tuple[str, Fields] | None,
    extras: Fields,
) -> Generate:
    """Build the task. Raises InvalidValue, TooManyInputs, WrongType and Unsupported, with the field at fault."""
    if payload.suffix:
        raise Unsupported("'suffix' is not supported: no model here inserts text; omit it.", param="suffix")
    n = payload.n or 1
    best_of = payload.best_of
    made, field = max((n, "n"), (best_of or 0, "best_of"), key=itemgetter(0))
    if len(prompts) * made > MAX_CHOICES:
        raise TooManyInputs(
            f"'{field}' of {made} for each of {len(prompts)} prompts makes more than {MAX_CHOICES} answers; split the "
            "request.",
            param=field,
        )
    if best_of is not None and best_of < n:
        raise InvalidValue(
            f"'best_of' is {best_of} and 'n' is {n}; 'best_of' cannot be less than 'n'.", param="best_of"
        )
    if best_of is not None and best_of > n and payload.stream:
        raise InvalidValue("'best_of' cannot be streamed: the best answer is known only at the end.", param="best_of")
    return Generate(
        model=model,
        prompts=prompts,
        n=n,
        best_of=best_of,
        sampling=to_sampling(
            payload,
            max_tokens=DEFAULT_MAX_TOKENS if payload.max_tokens is None else payload.max_tokens,
            logprobs=payload.logprobs,
            guide=to_guide(payload),
        ),
        stream=bool(payload.stream),
        echo=bool(payload.echo),
        adapter=adapter,
        raw=raw,
        extras=extras,
    )


def encode_body(answer: Answer, *, header: AnswerHeader, logprobs: bool) -> bytes:
    """Encode the whole answer."""
    return ENCODE(
        wire.TextCompletion(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=[_to_choice(each, logprobs=logprobs) for each in answer.choices],
            usage=to_usage(answer.usage or Usage()),
            timings=to_timings(answer),
        )
    )


def _to_choice(choice: Choice, *, logprobs: bool) -> wire.TextChoice:
    return wire.TextChoice(
        text=choice.reasoning + choice.text,
        index=choice.index,
        logprobs=to_logprobs(choice.logprobs)[0] if logprobs else None,
        finish_reason=choice.finish_reason,
    )


def to_logprobs(tokens: list[TokenLogprob], offset: int = 0) -> tuple[wire.TextLogprobs, int]:
    """Convert tokens that begin `offset` characters into the text. Also returns the offset after them."""
    logprobs = wire.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for each in tokens:
        logprobs.tokens.append(each.token)
        logprobs.token_logprobs.append(to_finite_logprob(each.logprob))
        likeliest = {top.token: to_finite_logprob(top.logprob) for top in each.top}
        logprobs.top_logprobs.append({**likeliest, each.token: to_finite_logprob(each.logprob)})
        logprobs.text_offset.append(offset)
        offset += len(each.token)
    return logprobs, offset


class TextEvents(CompletionEvents):
    def __init__(self, header: AnswerHeader, request: Request, *, choices: int, include_usage: bool) -> None:
        super().__init__(header, "text_completion", request, choices=choices, include_usage=include_usage)
        self._offsets: dict[int, int] = {}

    def _encode_choice_chunk(self, chunk: Chunk) -> bytes:
        data = b""
        text = chunk.reasoning + chunk.text
        if text or chunk.logprobs:
            logprobs = b"null"
            if chunk.logprobs:
                found, self._offsets[chunk.index] = to_logprobs(chunk.logprobs, self._offsets.get(chunk.index, 0))
                logprobs = ENCODE(found)
            data = self._encode_event(chunk.index, ENCODE(text), logprobs)
        if chunk.finish_reason is not None:
            data += self.finish_choice(self._encode_event(chunk.index, b'""', reason=ENCODE(chunk.finish_reason)))
        return data

    def _encode_event(self, index: int, text: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, reason)
        return self.head + choice + self.tail
