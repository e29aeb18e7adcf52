"""Resolve token ids sent instead of texts, depending on the tokenizer that made them.

Ids from another tokenizer give a wrong vector without any error, because most ids of short texts are valid in any
vocabulary. LangChain's OpenAIEmbeddings sends ids of OpenAI's tables by default, whatever the model. So ids are
accepted only if their meaning is known:
- Under the name of an OpenAI model they belong to that model's table, and are decoded to texts.
- An upstream that clients send its own ids to knows them.
- For all other models the operator decides.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shoal.errors import InvalidValue, Unsupported
from shoal.http.request import Headers
from shoal.surfaces.shared.input_parsing import ImageReference
from shoal.types import TextItem

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard

TABLES = dict.fromkeys(("text-embedding-3-small", "text-embedding-3-large", "text-embedding-ada-002"), "cl100k_base")
"""OpenAI's embedding models, and the tiktoken tables of their ids."""

HEADER = "x-shoal-token-ids"
HEADER_DOCS = {
    HEADER: "How token ids were read. taken: as the model's own. decoded: with the vocabulary of OpenAI's model of "
    "that name."
}
TAKEN: Headers = [(HEADER.encode(), b"taken")]
DECODED: Headers = [(HEADER.encode(), b"decoded")]
ALTERNATIVE = (
    "send text: in LangChain's OpenAIEmbeddings, which sends tiktoken's ids, set check_embedding_ctx_length=False"
)

AnyInput = TypeVar("AnyInput", TextItem, TextItem | ImageReference)

_loading = threading.Lock()


async def resolve_token_ids(
    inputs: list[AnyInput], name: str, card: ModelCard, policy: Literal["accept", "refuse"]
) -> tuple[list[AnyInput], Headers]:
    """Return the inputs for the model, and a header that says how token ids were used. `name` is as requested.

    Raises Unsupported if the meaning of the ids is unknown, and InvalidValue for ids that the table does not have.
    """
    ids = [each for each in inputs if isinstance(each, list)]
    if not ids:
        return inputs, []
    if card.facts is not None and card.facts.knows_token_ids:
        return inputs, TAKEN
    if name in TABLES:
        return list(await asyncio.to_thread(_decode, ids, TABLES[name])), DECODED
    if policy == "refuse":
        raise Unsupported(
            f"token ids are rejected, since most clients use another tokenizer than this model's: {ALTERNATIVE} (to "
            "accept ids of the model's own tokenizer, the operator sets token_ids to accept)",
            param="input",
        )
    return inputs, TAKEN


def _decode(ids: Sequence[list[Any]], table: str) -> list[str]:
    encoding = _load_table(table)
    if encoding is None:
        raise Unsupported(
            f"token ids sent to an OpenAI model name need the vocabulary {table}, which is not installed: "
            f"{ALTERNATIVE} (the operator can install tiktoken and fill its cache, or give the model another name)",
            param="input",
        )
    try:
        texts: list[str] = [encoding.decode(one) for one in ids]
    except (KeyError, OverflowError):
        raise InvalidValue(
            f"the input has a token id that the vocabulary {table} does not contain", param="input"
        ) from None
    return texts


def _load_table(name: str) -> Any:
    """Load a tiktoken table. Returns None without tiktoken, or if the table is not cached: requests never download."""
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
