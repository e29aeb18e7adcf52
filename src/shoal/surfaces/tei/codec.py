"""/tokenize and /decode of text-embeddings-inference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import orjson

from shoal.core.protocols import ModelFacts, Token
from shoal.errors import EmptyInput, WrongType
from shoal.http.json import decoder
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.shared import default_models, vector_encoding
from shoal.surfaces.tei import replies, wire
from shoal.types import Array

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


class TeiCodec:
    """Tokenizes and decodes with the server's main model, or with a named one."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._tokenized = decoder.Decoder(wire.TeiTokenizeRequest, "tei", options.max_inputs)
        self._decoded = decoder.Decoder(wire.TeiDecodeRequest, "tei", options.max_inputs)

    async def tokenize(self, request: Request) -> Reply:
        payload = await self._tokenized.decode_async(request.body)
        texts = [payload.inputs] if isinstance(payload.inputs, str) else payload.inputs
        if not texts:
            raise EmptyInput("`inputs` cannot be empty", param="inputs")
        replies.check_count(len(texts), self._limit)
        if not all(texts):
            raise EmptyInput(replies.EMPTY_INPUT, param="inputs")
        card = await self._find_model(request, payload.model)
        special = payload.add_special_tokens is not False
        async with self._gateway.using_codec(card.name, default_models.wait_context(request)) as codec:
            tokens = await codec.tokenize(texts, add_special_tokens=special, prompt_name=payload.prompt_name)
        prompt = _prompt_text(card.facts, payload.prompt_name)
        spans = []
        for text, each in zip(texts, tokens, strict=True):
            spans.append(_to_byte_offsets(prompt + text, each))
            await asyncio.sleep(0)
        return Reply(200, [JSON], await vector_encoding.encode_arrays(spans, orjson.dumps))

    async def decode(self, request: Request) -> Reply:
        payload = await self._decoded.decode_async(request.body)
        kinds = set(map(type, payload.ids))
        if len(kinds) > 1:
            raise WrongType("'ids' mixes ids and lists of ids; send one kind.", param="ids")
        ids = cast(list[list[int]], payload.ids if list in kinds else [payload.ids])
        replies.check_count(len(ids), self._limit)
        if not all(ids):
            raise EmptyInput("Input validation error: `input_ids` cannot be empty", param="ids")
        card = await self._find_model(request, payload.model)
        skip = payload.skip_special_tokens is not False
        async with self._gateway.using_codec(card.name, default_models.wait_context(request)) as codec:
            texts = await codec.decode(ids, skip_special_tokens=skip)
        return Reply(
            200,
            [JSON],
            await vector_encoding.encode_array(len(texts), lambda start, stop: orjson.dumps(texts[start:stop])),
        )

    async def _find_model(self, request: Request, name: str | None) -> ModelCard:
        return await default_models.wake_model(
            self._gateway, request, default_models.find_main_model(self._gateway, name)
        )


def _prompt_text(facts: ModelFacts | None, name: str | None) -> str:
    """Return the prompt that the model puts before the texts; the reported tokens include the prompt's."""
    if facts is None:
        return ""
    return facts.prompts.get(name or facts.default_prompt_name or "", "")


def _to_byte_offsets(text: str, tokens: Sequence[Token]) -> Sequence[Token]:
    """Convert the tokens' character offsets to UTF-8 byte offsets, as the original reports."""
    if text.isascii():
        return tokens
    points: Array = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    before: list[int] = np.concatenate(([0], np.cumsum(widths))).tolist()
    return [_shift_offsets(each, before) for each in tokens]


def _shift_offsets(token: Token, before: list[int]) -> Token:
    if token.start is None or token.stop is None:
        return token
    return Token(token.id, token.text, token.special, before[token.start], before[token.stop])
