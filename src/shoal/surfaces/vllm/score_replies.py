"""Build the replies of vLLM's pooling routes, which share one envelope."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.http.request import JSON, Body, Reply, Request
from shoal.surfaces.shared import batch_headers, ranking
from shoal.types import Result

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


def get_labels(gateway: Gateway, model: str) -> tuple[str, ...]:
    """Return the labels of a model that just classified, in the order of its scores."""
    facts = gateway.model(model).facts
    return facts.labels if facts is not None else ()


def build_reply(request: Request, prefix: str, model: str, listed: Body, result: Result, kind: str = "list") -> Reply:
    """Build the reply. `listed` is the JSON array of the entries, `kind` the value of `object`.

    The id is `prefix` and the request's id, which is also in the log.
    """
    head = {"id": f"{prefix}-{request.id}", "object": kind, "created": int(time.time()), "model": model}
    body = ranking.wrap_body(
        ranking.open_object(head, "data"), listed, ranking.close_object({"usage": _count_usage(result)})
    )
    return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)


def _count_usage(result: Result) -> dict[str, Any]:
    total = sum(result.tokens)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
