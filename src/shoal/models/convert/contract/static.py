"""Read static models: a table with one vector per token, whose mean is the text's. They have no layers, positions or
special tokens.

Two libraries save them, and each table is read as its own library reads it. sentence-transformers' StaticEmbedding
calls it `embedding.weight`, counts every token, and cuts a text where its tokenizer.json says so. model2vec
(github.com/MinishLab/model2vec) calls it `embeddings`, may store fewer rows than there are ids (`mapping`) and a factor
for each id (`weights`), leaves unknown tokens out of the mean, and cuts at the `max_length` of its config.json, 512 if
that is not set.
"""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ModelFileError
from shoal.models.convert.contract.entries import Entry
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.lengths import Length, shortest
from shoal.models.convert.contract.modules import after_modules, compute_output_width, truncate_modules
from shoal.models.convert.contract.saved import read_saved
from shoal.models.convert.contract.types import Contract, Normalize, Pooling, Table
from shoal.models.convert.contract.vocabulary import Vocabulary
from shoal.models.convert.contract.weights import open_weights

MODEL2VEC_TOKENS = 512
MOST_TOKENS = 8192
"""Limit for a table whose files state no length. There are no positions to run out of, and one more token hardly
changes the mean of so many; but the cost of a request must be limited."""

_ARCHITECTURE = "StaticModel"
_TABLE, _MODEL2VEC_TABLE = "embedding.weight", "embeddings"


def is_model2vec(config: JsonFile | None) -> bool:
    """Whether model2vec wrote this config.json."""
    if config is None:
        return False
    architectures = config.data.get("architectures")
    return config.data.get("model_type") == "model2vec" or architectures == [_ARCHITECTURE]


def read_static(folder: Path, entries: tuple[Entry, ...] | None) -> Contract | None:
    """Return the contract of a static model, None for a model of another kind; model2vec's folders need no
    modules.json.

    Raises ModelFileError for missing or unknown content.
    """
    config = read_object(folder, "config.json")
    if entries is None and not is_model2vec(config):
        return None
    if entries is not None and entries[0].kind != "StaticEmbedding":
        return None
    path = entries[0].path if entries else ""
    table = read_table(folder, path)
    if entries is not None:
        modules = after_modules(folder, entries[1:])
    else:
        modules = (Normalize(),) if config is not None and config.boolean("normalize", False) else ()
    saved = read_saved(folder)
    modules = truncate_modules(modules, saved.dimensions)
    length = table_length(folder, table)
    return Contract(
        encoder_path=path,
        encoder=None,
        pooling=Pooling(),
        modules=modules,
        dimension=compute_output_width(table.width, modules),
        max_tokens=length.tokens,
        max_tokens_at=(length.file, length.key),
        vocab_size=table.ids,
        prompts=saved.prompts,
        default_prompt_name=saved.default_prompt_name,
        similarity=saved.similarity,
        table=table,
    )


def read_table(folder: Path, path: str) -> Table:
    """Read the table in a module's folder. Raises ModelFileError if it is missing or its tensors do not fit
    together."""
    weights = open_weights(folder, path)
    tensor = _TABLE if _TABLE in weights else _MODEL2VEC_TABLE
    stored, width = weights.table(tensor)
    if tensor == _TABLE:
        return Table(path=path, tensor=tensor, stored=stored, width=width, ids=stored)
    places = weights.integers("mapping")
    ids = stored if places is None else len(places)
    if places is not None and (not ids or int(places.min()) < 0 or int(places.max()) >= stored):
        raise ModelFileError(f"must refer to rows of {tensor}, which has {stored}", file=weights.where, key="mapping")
    factors = "weights" if weights.has("weights") else ""
    if factors:
        weights.check(factors, (ids,))
    unknown = Vocabulary(folder, f"{path}/" if path else "").unknown
    return Table(
        path=path,
        tensor=tensor,
        stored=stored,
        width=width,
        ids=ids,
        mapping="" if places is None else "mapping",
        weights=factors,
        dropped=() if unknown is None else (unknown,),
    )


def table_length(folder: Path, table: Table) -> Length:
    """Return how many tokens of a text are read."""
    prefix = f"{table.path}/" if table.path else ""
    if table.tensor == _TABLE:
        limit = Vocabulary(folder, prefix).limit
        return shortest([Length(limit or MOST_TOKENS, f"{prefix}tokenizer.json", "truncation")])
    config = read_object(folder, "config.json")
    if config is None or "max_length" not in config.data:
        return Length(MODEL2VEC_TOKENS, "config.json", "max_length")
    stated = config.integer("max_length", MOST_TOKENS, least=1)
    return shortest([Length(stated, config.name, "max_length")])
