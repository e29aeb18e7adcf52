"""Which routes for scores a server has for a model, found by questions that cost it nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shoal.backends.base.http_answer import Answer, rejected_key_error
from shoal.backends.base.http_client import Client
from shoal.backends.openai.calls import RouteCalls
from shoal.backends.openai.errors import lacks_model, lacks_route
from shoal.backends.openai.scores import ClassifyCalls, LabelNames, RerankCalls, ScoreCalls

Kind = Literal["score", "rerank", "classify"]

BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a server that may answer otherwise later. One that fails over an empty question has the route."""

# Without anything to score, every server refuses these, or has nothing to do.
_EMPTY_REQUESTS: Mapping[Kind, dict[str, Any]] = {
    "score": {"text_1": [], "text_2": []},
    "rerank": {"query": "", "documents": []},
    "classify": {"input": []},
}


@dataclass(frozen=True, slots=True)
class Route:
    """`path` as Client takes it."""

    kind: Kind
    path: str

    def make_calls(self, labels: LabelNames) -> RouteCalls:
        """For one engine; those of one model share their labels."""
        if self.kind == "classify":
            return ClassifyCalls(self.path, labels)
        return ScoreCalls(self.path) if self.kind == "score" else RerankCalls(self.path)


async def find_score_routes(
    client: Client, model: str, kinds: Sequence[Kind], patience_s: float
) -> tuple[list[Route], list[Answer]]:
    """The routes of these kinds, and the answers of a server that cannot say yet, or not to this key.

    vLLM has some of them beside the path that its other routes are below, so that both places are asked. Raises
    TransportFailed and DeadlineExceeded.
    """
    found: list[Route] = []
    unsure: list[Answer] = []
    for kind in kinds:
        for path in _route_paths(client, kind):
            body = msgspec.json.encode({"model": model, **_EMPTY_REQUESTS[kind]})
            answer = await client.post(path, body, time.monotonic() + patience_s)
            if answer.status in BUSY or rejected_key_error(answer, client.base):
                unsure.append(answer)
            elif _has_route(answer):
                found.append(Route(kind, path))
                break
    return found, unsure


def _route_paths(client: Client, kind: Kind) -> list[str]:
    root = client.base.removesuffix("/v1")
    return [f"/{kind}"] if root == client.base else [f"/{kind}", f"{root}/{kind}"]


def _has_route(answer: Answer) -> bool:
    """A page, or a redirect, is none of the route's."""
    return (
        not (lacks_model(answer) or lacks_route(answer))
        and not 300 <= answer.status < 400
        and "html" not in answer.content_type
    )
