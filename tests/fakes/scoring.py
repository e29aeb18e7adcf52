"""Scripts of score routes for `FakeUpstream.on`, in the formats of several OpenAI-compatible servers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.types import Array
from tests.fakes.openai_server import Exchange, Script, answer

EMPTY = answer({"error": {"message": "at least one text is needed"}}, 400)
NO_TASK = answer({"error": {"message": "The model does not support Rerank (Score) API"}}, 400)
POISON = "poison-item"
LABELS = ("joy", "fear", "calm")

JsonObject = dict[str, Any]


def logit_of(item: Any, labels: int = 1, *, seed: int = 0) -> Array:
    """Return the logits of a text or a pair of texts: float32 [labels]."""
    draw = np.random.default_rng([seed, zlib.crc32(repr(item).encode())])
    return (draw.standard_normal(labels) * 2).astype(np.float32)


def probability_of(item: Any, labels: int = 1, *, seed: int = 0) -> Array:
    """Return the same after a sigmoid or a softmax."""
    logits = logit_of(item, labels, seed=seed)
    powers = np.exp(logits)
    found: Array = powers / (1 + powers) if labels == 1 else powers / powers.sum()
    return found


def usage_of(texts: Sequence[str], name: str = "prompt_tokens") -> JsonObject:
    return {"usage": {name: sum(len(text.split()) + 1 for text in texts)}}


def with_refusals(body: Callable[[JsonObject], JsonObject | None], texts: Callable[[JsonObject], list[str]]) -> Script:
    """Answer with `body(request)`; 400 for a request without texts or with a poisoned one."""

    async def run(exchange: Exchange) -> None:
        request = exchange.request.json
        inputs = texts(request)
        if not inputs:
            return await EMPTY(exchange)
        if any(POISON in text for text in inputs):
            return await answer({"error": {"message": "this text is bad"}}, 400)(exchange)
        found = body(request)
        return await (answer(found) if found is not None else NO_TASK)(exchange)

    return run


def vllm_score(*, raw: bool = True, seed: int = 0) -> Script:
    """Script of /score; `raw`: `use_activation` is supported."""

    def body(request: JsonObject) -> JsonObject:
        as_it_is = raw and request.get("use_activation") is False
        score = logit_of if as_it_is else probability_of
        pairs = list(zip(request["text_1"], request["text_2"], strict=True))
        rows = [{"index": at, "score": float(score(pair, seed=seed)[0])} for at, pair in enumerate(pairs)]
        return {"data": rows[::-1], **usage_of([*request["text_1"], *request["text_2"]])}

    return with_refusals(body, lambda request: [*request["text_1"], *request["text_2"]])


def rerank(
    key: str = "results", *, fields: Sequence[str] = ("top_n", "return_documents"), usage: bool = True
) -> Script:
    """Script of /rerank, sorted; request fields other than `fields` are refused. Voyage's `key` is "data"."""

    async def run(exchange: Exchange) -> None:
        request = exchange.request.json
        unknown = set(request) - {"model", "query", "documents", *fields}
        if unknown and request["documents"]:
            return await answer({"detail": f"Argument {sorted(unknown)[0]!r} is not supported"}, 400)(exchange)
        return await with_refusals(body, lambda request: request["documents"])(exchange)

    def body(request: JsonObject) -> JsonObject:
        query = request["query"]
        rows = [
            {"index": at, "relevance_score": float(probability_of((query, document))[0])}
            for at, document in enumerate(request["documents"])
        ]
        rows.sort(key=lambda row: -row["relevance_score"])
        return {key: rows, **(usage_of([query, *request["documents"]], "total_tokens") if usage else {})}

    return run


def vllm_classify(labels: int = 3) -> Script:
    """Script of /classify: the likeliest label and all probabilities; texts only."""

    def body(request: JsonObject) -> JsonObject:
        score = logit_of if request.get("use_activation") is False else probability_of
        rows = [score(text, labels).tolist() for text in request["input"]]
        data = [
            {"index": at, "label": LABELS[int(np.argmax(row))], "probs": row, "num_classes": labels}
            for at, row in enumerate(rows)
        ]
        return {"data": data, **usage_of(request["input"])}

    return with_refusals(body, lambda request: [str(text) for text in request["input"]])


def infinity_classify() -> Script:
    """Script of /classify: every label and its score, sorted."""

    def body(request: JsonObject) -> JsonObject:
        data = []
        for text in request["input"]:
            row = zip(LABELS, probability_of(text, 3).tolist(), strict=True)
            data.append([{"label": label, "score": score} for label, score in sorted(row, key=lambda each: -each[1])])
        return {"object": "classify", "data": data, **usage_of(request["input"])}

    return with_refusals(body, lambda request: request["input"])
