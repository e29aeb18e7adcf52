"""Finds the scoring routes that a server has for a model, with requests that cost no computation."""

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
"""Statuses after which the server may answer differently later. 500 is not among them: a server that answers 500 to an
empty request has the route."""

# With nothing to score, a server rejects these or does nothing.
_EMPTY_REQUESTS: Mapping[Kind, dict[str, Any]] = {
    "score": {"text_1": [], "text_2": []},
    "rerank": {"query": "", "documents": []},
    "classify": {"input": []},
}


@dataclass(frozen=True, slots=True)
class Route:
    """A scoring route. `path` is relative to the client's base, as Client takes it."""

    kind: Kind
    path: str

    def make_calls(self, labels: LabelNames) -> RouteCalls:
        """Return the calls of one engine. Engines of one model share `labels`."""
        if self.kind == "classify":
            return ClassifyCalls(self.path, labels)
        return ScoreCalls(self.path) if self.kind == "score" else RerankCalls(self.path)


async def find_score_routes(
    client: Client, model: str, kinds: Sequence[Kind], patience_s: float
) -> tuple[list[Route], list[Answer]]:
    """Return the routes of these kinds, and the inconclusive answers: those of a busy server or about a rejected key.

    vLLM serves some of them outside the path of its other routes, so both places are tried. Raises TransportFailed and
    DeadlineExceeded.
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
    """Whether the answer comes from the route; an HTML page or a redirect does not."""
    return (
        not (lacks_model(answer) or lacks_route(answer))
        and not 300 <= answer.status < 400
        and "html" not in answer.content_type
    )
