"""Routes for scores of an OpenAI-compatible server, scripted in the shapes of several: for `FakeUpstream.on`."""

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

Told = dict[str, Any]


def logit_of(item: Any, labels: int = 1, *, seed: int = 0) -> Array:
    """What the model thinks of a text, or a pair of texts: float32 [labels]."""
    draw = np.random.default_rng([seed, zlib.crc32(repr(item).encode())])
    return (draw.standard_normal(labels) * 2).astype(np.float32)


def probability_of(item: Any, labels: int = 1, *, seed: int = 0) -> Array:
    """The same, under a sigmoid or a softmax."""
    logits = logit_of(item, labels, seed=seed)
    powers = np.exp(logits)
    found: Array = powers / (1 + powers) if labels == 1 else powers / powers.sum()
    return found


def usage_of(texts: Sequence[str], name: str = "prompt_tokens") -> Told:
    return {"usage": {name: sum(len(text.split()) + 1 for text in texts)}}


def refusing(body: Callable[[Told], Told | None], texts: Callable[[Told], list[str]]) -> Script:
    """Answers `body` of a request; refuses one without texts, and fails over the poisoned one."""

    async def run(exchange: Exchange) -> None:
        asked = exchange.request.json
        given = texts(asked)
        if not given:
            return await EMPTY(exchange)
        if any(POISON in text for text in given):
            return await answer({"error": {"message": "this text is bad"}}, 400)(exchange)
        found = body(asked)
        return await (answer(found) if found is not None else NO_TASK)(exchange)

    return run


def vllm_score(*, raw: bool = True, seed: int = 0) -> Script:
    """/score; `raw`: it knows `use_activation`."""

    def body(asked: Told) -> Told:
        as_it_is = raw and asked.get("use_activation") is False
        score = logit_of if as_it_is else probability_of
        pairs = list(zip(asked["text_1"], asked["text_2"], strict=True))
        rows = [{"index": at, "score": float(score(pair, seed=seed)[0])} for at, pair in enumerate(pairs)]
        return {"data": rows[::-1], **usage_of([*asked["text_1"], *asked["text_2"]])}

    return refusing(body, lambda asked: [*asked["text_1"], *asked["text_2"]])


def rerank(
    key: str = "results", *, fields: Sequence[str] = ("top_n", "return_documents"), usage: bool = True
) -> Script:
    """/rerank, sorted; of the optional `fields` it refuses those that it does not know. Voyage's `key` is "data"."""

    async def run(exchange: Exchange) -> None:
        asked = exchange.request.json
        unknown = set(asked) - {"model", "query", "documents", *fields}
        if unknown and asked["documents"]:
            return await answer({"detail": f"Argument {sorted(unknown)[0]!r} is not supported"}, 400)(exchange)
        return await refusing(body, lambda asked: asked["documents"])(exchange)

    def body(asked: Told) -> Told:
        query = asked["query"]
        rows = [
            {"index": at, "relevance_score": float(probability_of((query, document))[0])}
            for at, document in enumerate(asked["documents"])
        ]
        rows.sort(key=lambda row: -row["relevance_score"])
        return {key: rows, **(usage_of([query, *asked["documents"]], "total_tokens") if usage else {})}

    return run


def vllm_classify(labels: int = 3) -> Script:
    """/classify with the likeliest label and all probabilities; texts alone."""

    def body(asked: Told) -> Told:
        score = logit_of if asked.get("use_activation") is False else probability_of
        rows = [score(text, labels).tolist() for text in asked["input"]]
        data = [
            {"index": at, "label": LABELS[int(np.argmax(row))], "probs": row, "num_classes": labels}
            for at, row in enumerate(rows)
        ]
        return {"data": data, **usage_of(asked["input"])}

    return refusing(body, lambda asked: [str(text) for text in asked["input"]])


def infinity_classify() -> Script:
    """/classify with every label and its score, sorted."""

    def body(asked: Told) -> Told:
        data = []
        for text in asked["input"]:
            row = zip(LABELS, probability_of(text, 3).tolist(), strict=True)
            data.append([{"label": label, "score": score} for label, score in sorted(row, key=lambda each: -each[1])])
        return {"object": "classify", "data": data, **usage_of(asked["input"])}

    return refusing(body, lambda asked: asked["input"])
