"""Maps errors of OpenAI-compatible servers to Shoal's: one table for generation, one for batches.

Sources: the statuses of OpenAI, vLLM, llama.cpp, Ollama and text-embeddings-inference.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shoal.backends.base.http_answer import Answer, quote_message, rejected_key_error, retry_after
from shoal.decoding import json_decoder
from shoal.errors import (
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
    UpstreamRefused,
)

_MEMORY = ("out of memory", "bad_alloc", "failed to allocate", "cannot allocate")
_BUDGET = re.compile(r"max_tokens_per_request|tokens per (\w+ )?(request|batch|call)", re.IGNORECASE)
_TOO_LARGE = re.compile(r"\btoo large to process\b")
"""llama.cpp's words for a text beyond its physical batch, for which its status is 500."""
_ERROR = json_decoder(dict[str, Any])
_NO_MODEL = re.compile(r"model.*(not found|not exist|unknown)|(unknown|no such) model|model_not_found", re.IGNORECASE)
_NO_ROUTE = re.compile(
    r"(404 )?((file|page|route|path|url|endpoint) )?not found\.?|invalid url \(.*\)|unknown request url: .*|",
    re.IGNORECASE | re.DOTALL,
)
"""Of FastAPI, llama.cpp and gin; of OpenAI and Groq (and Shoal); or nothing at all."""
_TASKS = r"chat|completions|embeddings?|rerank(?:ing)?|scor(?:e|ing)|classif(?:y|ication)"
_NO_TASK = re.compile(
    rf"not support(ed)?\b.*\b({_TASKS})\b|\b({_TASKS})\b.*\bnot supported"
    r"|(cannot|does not) (generate|embed|rerank|score|classify)",
    re.IGNORECASE,
)
_NO_MAX_TOKENS = re.compile(r"\bmax_tokens\b.*\bnot supported\b.*\bmax_completion_tokens\b", re.DOTALL)


def lacks_model(answer: Answer) -> bool:
    """Whether the server does not have the model: it answers 404, or 400 with a message that says so."""
    return answer.status in (400, 404) and _NO_MODEL.search(answer.raw_message) is not None


def lacks_route(answer: Answer) -> bool:
    """Whether the server lacks the route, or does not support it for this model."""
    if answer.status in (404, 405, 501):
        return not lacks_model(answer)
    return answer.status == 400 and _NO_TASK.search(answer.raw_message) is not None


def lacks_dialect(answer: Answer) -> bool:
    """Whether the server has no route for a dialect, as its router says: no other 404, such as of a response or an item
    that it does not know, means that."""
    if answer.status == 404:
        return not answer.has_json_body or _NO_ROUTE.fullmatch(answer.raw_message.strip()) is not None
    return answer.status in (405, 501)


def lacks_system_role(answer: Answer, sent: bytes) -> bool:
    """Whether the server refuses system messages inside of an Anthropic conversation, as vLLM before 0.23 does."""
    refused = answer.status in (400, 422) and b"'user' or 'assistant'" in answer.body
    return refused and b'"system"' in sent


def lacks_max_tokens(error: ShoalError) -> bool:
    """Whether the server wants `max_completion_tokens` instead, as OpenAI does for its newer models."""
    return isinstance(error, UpstreamRefused) and error.status == 400 and bool(_NO_MAX_TOKENS.search(error.message))


def refusal_error(answer: Answer, where: str) -> ShoalError:
    """Return the error of a generation. The server's JSON error is passed on; for any other body, such as the page of
    a proxy, `body` is empty and the message replaces it."""
    if error := rejected_key_error(answer, where):
        return error
    if 300 <= answer.status < 400:
        return UpstreamFailed(f"the server at {where} redirects, which Shoal does not follow: use its final address")
    if answer.status < 400:
        return UpstreamFailed(f"the server at {where} returned status {answer.status} instead of 200")
    return UpstreamRefused(
        f"the server at {where} refused with status {answer.status}{quote_message(answer)}",
        status=answer.status,
        body=_client_body(answer) if answer.has_json_body else b"",
        retry_after=retry_after(answer.headers),
        server=where,
    )


def find_failure(body: bytes, key: bytes = b"") -> UpstreamRefused | None:
    """Return the error in a whole answer of status 200; None if there is none, or the answer cannot be parsed."""
    if b'"error"' not in body:
        return None
    try:
        has_error = bool(_ERROR.decode(body).get("error"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return failure_error(body, key) if has_error else None


def failure_error(body: bytes, key: bytes = b"") -> UpstreamRefused:
    """Return the error for a JSON object with `error` in place of an answer or of its rest. The status is 500, or the
    error's `code` if that is a status; a rejection of Shoal's key counts as a failure of the server."""
    try:
        error = _ERROR.decode(body).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if type(code) is int and 400 <= code < 600 and code not in (401, 403) else 500
    answer = Answer(status, {}, body, key=key)
    return UpstreamRefused(
        f"the server failed in the middle of its answer{quote_message(answer)}",
        status=status,
        body=_client_body(answer),
    )


def invalid_answer_error(what: str) -> UpstreamRefused:
    """Return the error for an answer of status 200, or one of its events, that does not follow OpenAI's API."""
    return UpstreamRefused(
        f"the server returned {what}: check that the model's address has the path of an OpenAI-compatible API (usually"
        " /v1), and see the server's log",
        status=502,
    )


def _client_body(answer: Answer) -> bytes:
    """Return the body for the client: the server's own, or a replacement if that quotes Shoal's key."""
    if not answer.quotes_key:
        return answer.body
    message = f"the server refused with status {answer.status}; its message is withheld because it quotes Shoal's key"
    return msgspec.json.encode({"error": {"message": message, "type": "upstream_error", "param": None, "code": None}})


def engine_error(answer: Answer, where: str) -> ShoalError:
    """Return the error of a batch of embeddings or scores, as an Engine may raise it."""
    status = answer.status
    if error := rejected_key_error(answer, where):
        return error
    words = quote_message(answer)
    if status == 413 or (status in (400, 422) and _BUDGET.search(answer.raw_message)):
        return OutOfMemory(f"the batch is larger than the server at {where} accepts{words}: lower max_batch_tokens")
    if status == 429 or (status == 503 and retry_after(answer.headers) is not None):
        return Overloaded(
            f"the server at {where} is too busy{words}: try again", retry_after=retry_after(answer.headers)
        )
    if status in (502, 503, 504) or lacks_model(answer):
        return TransportFailed(f"the server at {where} cannot serve the model now (status {status}){words}: try again")
    if status in (400, 422) or _TOO_LARGE.search(answer.raw_message):
        return InputRejected(f"the server at {where} refused these inputs{words}")
    if any(memory in words.lower() for memory in _MEMORY):
        return OutOfMemory(f"the batch did not fit into the memory of the server at {where}{words}")
    return UpstreamFailed(f"the server at {where} failed with status {status}{words}: see its log")
