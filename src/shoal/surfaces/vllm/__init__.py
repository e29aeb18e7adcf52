"""vLLM's API for pooling models: /score, /classify and /pooling. Its rerank routes are in `rerank`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import EmptyInput, InvalidValue, ShoalError, WrongType
from shoal.http.errors import OpenAIError, render_error
from shoal.http.json import decoder
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.shared import batch_headers, default_models, ranking, token_ids, truncation
from shoal.surfaces.shared.input_parsing import check_count
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.vllm import score_replies
from shoal.surfaces.vllm import wire as wire
from shoal.surfaces.vllm.pooling import Pooling
from shoal.types import Classify, Rerank, TextPair

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), OpenAIError)
_POOLING_HEADER_DOCS = {**batch_headers.HEADER_DOCS, **token_ids.HEADER_DOCS}
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_QUESTION = "What is a shoal?"


class Scoring:
    name = "scoring"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        limit = self._options.max_inputs
        score, classify, pooling = (
            _ScoreEndpoint(gateway, limit),
            _ClassifyEndpoint(gateway, limit, is_infinity=self._options.status_dialect == "infinity"),
            Pooling(gateway, self._options),
        )
        answers = ["A group of fish.", "A kind of bread."]
        table: list[tuple[str, Any, str, Any, Any, Any]] = [
            (
                "/score",
                score,
                "Score pairs of texts",
                wire.ScoreRequest,
                wire.ScoreResponse,
                {"text_1": _QUESTION, "text_2": answers},
            ),
            (
                "/classify",
                classify,
                "Classify texts, or pairs of texts",
                wire.ClassifyRequest,
                (wire.ClassifyResponse, wire.InfinityClassifyResponse),
                {"input": ["I like you.", "I do not."]},
            ),
            (
                "/pooling",
                pooling,
                "Get a model's vectors or scores for texts",
                wire.PoolingRequest,
                wire.PoolingResponse,
                {"input": answers},
            ),
        ]
        return [
            Operation(
                method="POST",
                path=prefix + path,
                endpoint=endpoint,
                summary=summary,
                request=request,
                response=response,
                errors=_ERRORS,
                headers=batch_headers.HEADER_DOCS if path != "/pooling" else _POOLING_HEADER_DOCS,
                example=example,
            )
            for path, endpoint, summary, request, response, example in table
            for prefix in (("", "/v1") if path != "/pooling" else ("",))
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


class _ScoreEndpoint:
    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._decode = decoder.Decoder(wire.ScoreRequest, "scoring", limit)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        left, right = self._parse_sides(payload)
        if len(left) not in (1, len(right)):
            raise InvalidValue(
                f"{len(left)} texts cannot be paired with {len(right)}: send one text, or the same number, on the "
                "first side."
            )
        card = await default_models.find_default_model(self._gateway, request, payload.model, "rerank")
        truncate, direction = truncation.parse_prompt_truncation(
            card, payload.truncate_prompt_tokens, payload.truncation_side
        )
        task = Rerank(
            model=card.name,
            queries=left,
            documents=right,
            raw_scores=payload.use_activation is False,
            truncate=truncate,
            truncation_direction=direction,
            instruction=ranking.parse_instruction(payload),
        )
        result = await run_task(self._gateway, request, task)
        scores = result.scores[:, 0]
        listed = await ranking.encode_results(
            range(len(scores)), lambda place: {"index": place, "object": "score", "score": scores[place]}
        )
        return score_replies.build_reply(request, "score", card.name, listed, result)

    def _parse_sides(self, payload: wire.ScoreRequest) -> tuple[list[str], list[str]]:
        names = {name for pair in _SIDES for name in pair if getattr(payload, name) is not None}
        for left, right in _SIDES:
            if names == {left, right}:
                return self._parse_texts(getattr(payload, left), left), self._parse_texts(
                    getattr(payload, right), right
                )
        pairs = ", ".join(f"'{left}' and '{right}'" for left, right in _SIDES)
        raise WrongType(f"Exactly two sides are required: send {pairs}.", param=min(names, default="text_1"))

    def _parse_texts(self, texts: str | list[str], name: str) -> list[str]:
        return ranking.parse_rank_texts([texts] if isinstance(texts, str) else texts, name, self._limit)


class _ClassifyEndpoint:
    """Replies as vLLM; as Infinity to a body with `raw_scores`, or always if `is_infinity`."""

    def __init__(self, gateway: Gateway, limit: int, *, is_infinity: bool) -> None:
        self._gateway = gateway
        self._limit = limit
        self._is_infinity = is_infinity
        self._decode = decoder.Decoder(wire.ClassifyRequest, "scoring", limit)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        inputs = self._parse_inputs(payload.input)
        card = await default_models.find_default_model(self._gateway, request, payload.model, "classify")
        truncate, direction = truncation.parse_prompt_truncation(
            card, payload.truncate_prompt_tokens, payload.truncation_side
        )
        task = Classify(
            model=card.name,
            inputs=inputs,
            raw_scores=ranking.wants_raw_scores(payload.raw_scores, payload.use_activation),
            truncate=truncate,
            truncation_direction=direction,
        )
        result = await run_task(self._gateway, request, task)
        labels = score_replies.get_labels(self._gateway, card.name)
        best = result.scores.argmax(axis=1).tolist()

        def entry(place: int) -> dict[str, Any]:
            label = labels[best[place]] if best[place] < len(labels) else None
            row = result.scores[place]
            return {"index": place, "label": label, "probs": row, "num_classes": len(row)}

        def scores_by_label(place: int) -> list[dict[str, Any]]:
            row = result.scores[place]
            order = ranking.sort_descending(row)
            return [{"score": row[at], "label": labels[at] if at < len(labels) else f"LABEL_{at}"} for at in order]

        if self._is_infinity or payload.raw_scores is not None:  # always sent by Infinity's generated client
            listed = await ranking.encode_results(range(len(inputs)), scores_by_label)
            return score_replies.build_reply(request, "classify", card.name, listed, result, "classify")
        listed = await ranking.encode_results(range(len(inputs)), entry)
        return score_replies.build_reply(request, "classify", card.name, listed, result)

    def _parse_inputs(self, inputs: str | list[str | list[str]]) -> list[str | TextPair]:
        items = [inputs] if isinstance(inputs, str) else inputs
        if not items:
            raise EmptyInput("'input' is an empty list; send at least one text.", param="input")
        check_count(items, "input", self._limit)
        return [_to_item(each, at) for at, each in enumerate(items)]


def _to_item(item: str | list[str], at: int) -> str | TextPair:
    match item:
        case str() | [str()]:
            text = item if isinstance(item, str) else item[0]
            if not text:
                raise EmptyInput(f"'input[{at}]' is empty; omit it or send a text.", param="input")
            return text
        case [first, second]:
            return first, second
        case _:
            raise WrongType(f"'input[{at}]' must be a text or a pair of texts.", param="input")
