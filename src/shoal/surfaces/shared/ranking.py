"""Shared code of the rerank dialects: parse texts, build the task, sort the scores, write the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson

from shoal.errors import EmptyInput, InvalidValue, Unsupported, WrongType
from shoal.http.json.refused import is_set
from shoal.http.request import Body
from shoal.surfaces.shared import truncation, vector_encoding
from shoal.surfaces.shared.input_parsing import check_count
from shoal.surfaces.shared.wire_ranking import Instructed, RankText
from shoal.types import Array, Direction, Rerank, Scored

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard

_KWARGS = "chat_template_kwargs"

DOCUMENTS_A_UNIT = 100
"""Documents per search unit: Cohere counts a query with up to this many documents as one."""


def parse_rank_texts(texts: Sequence[str | RankText], field: str, limit: int) -> list[str]:
    """Parse a list of texts to rank. Empty texts are allowed.

    Raises EmptyInput for an empty list, TooManyInputs, and Unsupported for an image.
    """
    if not texts:
        raise EmptyInput(f"'{field}' is an empty list; send at least one text.", param=field)
    check_count(texts, field, limit)
    return [parse_text(each, f"{field}[{at}]") for at, each in enumerate(texts)]


def parse_text(text: str | RankText, field: str) -> str:
    if isinstance(text, str):
        return text
    if is_set(text.image):
        raise Unsupported(f"'{field}' has an image; only texts can be ranked.", param=field.partition("[")[0])
    return text.text


def parse_query(text: str | RankText) -> str:
    """Parse the query. Raises EmptyInput if it is blank, and Unsupported for an image."""
    query = parse_text(text, "query")
    if not query.strip():
        raise EmptyInput("'query' is empty; send a text.", param="query")
    return query


def resolve_document_tokens(card: ModelCard, limit: int | None) -> int | None:
    """Return the token limit per document, or None if it has no effect."""
    return None if not limit or truncation.fits(card, limit) else limit


def wants_raw_scores(raw_scores: bool | None, use_activation: bool | None) -> bool:
    """Whether scores come without the activation. Raises InvalidValue if the two fields contradict each other."""
    if raw_scores is not None and use_activation is not None and raw_scores == use_activation:
        raise InvalidValue("'raw_scores' and 'use_activation' contradict each other; send one.", param="raw_scores")
    return bool(raw_scores) or use_activation is False


def parse_instruction(payload: Instructed) -> str | None:
    """Return the request's instruction, None for the model's default. Raises InvalidValue for names with different
    values, WrongType for one that is no text, and Unsupported for other variables of a template."""
    names = ("instruction", "instruct")
    more = {name: value for name, value in (payload.chat_template_kwargs or {}).items() if value is not None}
    for name, value in more.items():
        if name not in names:
            raise Unsupported(f"'chat_template_kwargs' has {name[:200]!r}; only {names} can be set.", param=_KWARGS)
        if not isinstance(value, str):
            raise WrongType(f"'chat_template_kwargs.{name}' must be a string.", param=_KWARGS)
    given = {name: getattr(payload, name) for name in names} | {f"{_KWARGS}.{name}": more[name] for name in more}
    return cast(str | None, truncation.merge_fields(**{name: value or None for name, value in given.items()}))


def build_task(
    card: ModelCard,
    query: str,
    documents: list[str],
    *,
    raw: bool = False,
    cut: tuple[bool | None, Direction] = (None, "right"),
    max_document_tokens: int | None = None,
    instruction: str | None = None,
) -> Rerank:
    return Rerank(
        model=card.name,
        queries=[query],
        documents=documents,
        raw_scores=raw,
        truncate=cut[0],
        truncation_direction=cut[1],
        max_document_tokens=max_document_tokens,
        instruction=instruction,
    )


def sort_descending(scores: Array, limit: int | None = None) -> list[int]:
    """Return the indices of the scores, highest first; ties keep their order. `limit` limits them (0 or None: all)."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:limit] if limit else order


async def encode_results(order: Sequence[int], entry: Callable[[int], object]) -> Body:
    """Encode a JSON array with the entry of each index, a slice at a time. Entries may hold NumPy numbers."""

    def some(start: int, stop: int) -> bytes:
        rows = [entry(place) for place in order[start:stop]]
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)

    return await vector_encoding.encode_array(len(order), some)


def wrap_body(head: bytes, body: Body, tail: bytes) -> Body:
    """Wrap `body` from `encode_results` into an object."""
    assert isinstance(body, bytes | list)
    return head + body + tail if isinstance(body, bytes) else [head, *body, tail]


def open_object(fields: dict[str, Any], name: str) -> bytes:
    """Encode `fields` as an object that is left open at the value of `name`."""
    inside = orjson.dumps(fields)[1:-1]
    return b'{%b%b"%b":' % (inside, b"," if inside else b"", name.encode())


def close_object(fields: dict[str, Any]) -> bytes:
    """Encode the rest of an object from `open_object`, after the open value."""
    inside = orjson.dumps(fields)[1:-1]
    return b"%b%b}" % (b"," if inside else b"", inside)


def count_usage(result: Scored) -> dict[str, int]:
    total = sum(result.tokens)
    return {"prompt_tokens": total, "total_tokens": total}


def search_meta(version: str, count: int, tokens: int) -> dict[str, Any]:
    """Build Cohere's `meta` for a search among `count` documents."""
    return {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-count // DOCUMENTS_A_UNIT)},
        "tokens": {"input_tokens": tokens},
    }
