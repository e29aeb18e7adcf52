"""Token ids in the place of texts: whose tokenizer made them, and what becomes of them.

A vector of ids that another tokenizer made is a wrong one, and nothing about it shows it: most short texts have ids
that are some tokens of any vocabulary. LangChain's OpenAIEmbeddings sends ids of OpenAI's tables by default, whatever
the model. So ids are taken where their meaning is known: under a name of OpenAI's they are of that model's table, and
become texts again; a server of OpenAI's API knows its own; for all others the operator says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.errors import InvalidValue, Unsupported
from shoal.http.request import Headers
from shoal.surfaces.shared.input_parsing import Input

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard

TABLES = dict.fromkeys(("text-embedding-3-small", "text-embedding-3-large", "text-embedding-ada-002"), "cl100k_base")
"""OpenAI's models for embedding, and the tables that their ids are of."""

HEADER = "x-shoal-token-ids"
HEADER_DOCS = {
    HEADER: "Where the inputs came as token ids. taken: as the model's own. decoded: with the table of OpenAI's model "
    "of that name."
}
ALTERNATIVE = (
    "send text: in LangChain's OpenAIEmbeddings, which sends tiktoken's ids, set check_embedding_ctx_length=False"
)

_loading = threading.Lock()


async def resolve_token_ids(
    given: list[Input], name: str, card: ModelCard, policy: Literal["accept", "refuse"]
) -> tuple[list[Input], Headers]:
    """The inputs that the model reads, and the header that says what ids they came from. `name`: as it was asked for.

    Raises Unsupported where nobody knows what the ids mean, InvalidValue for ids that the table does not have.
    """
    ids = [each for each in given if isinstance(each, list)]
    if not ids:
        return given, []
    if card.facts is not None and card.facts.backend == "openai":
        return given, _build_header(b"taken")
    if name in TABLES:
        return list(await asyncio.to_thread(_decode, ids, TABLES[name])), _build_header(b"decoded")
    if policy == "refuse":
        raise Unsupported(
            f"token ids are not taken here, since most are of another tokenizer than this model's: {ALTERNATIVE} "
            f"(for ids "
            "that the model's own tokenizer made, the operator sets token_ids to accept)",
            param="input",
        )
    return given, _build_header(b"taken")


def _build_header(how: bytes) -> Headers:
    return [(HEADER.encode(), how)]


def _decode(ids: Sequence[list[Any]], table: str) -> list[str]:
    encoding = _load_table(table)
    if encoding is None:
        raise Unsupported(
            f"token ids under a name of OpenAI's are of the table {table}, which is not on this machine: {ALTERNATIVE} "
            "(the operator can install tiktoken and fill its cache, or give the model another name)",
            param="input",
        )
    try:
        texts: list[str] = [encoding.decode(one) for one in ids]
    except (KeyError, OverflowError):
        raise InvalidValue(f"the input holds a token id that the table {table} does not have", param="input") from None
    return texts


def _load_table(name: str) -> Any:
    """tiktoken's table, None where it is not installed or would have to be fetched: requests fetch nothing."""
    try:
        import tiktoken
        from tiktoken import load
    except ImportError:
        return None

    def absent(path: str) -> bytes:
        raise FileNotFoundError(path)

    with _loading:
        fetch, load.read_file = load.read_file, absent
        try:
            return tiktoken.get_encoding(name)
        except FileNotFoundError:
            return None
        finally:
            load.read_file = fetch
