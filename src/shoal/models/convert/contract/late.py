"""Read late-interaction (ColBERT) models: a vector per token, and how queries and documents are laid out for it.

There are four kinds of files: PyLate's (settings in config_sentence_transformers.json), those of sentence-transformers'
MultiVectorEncoder (settings on its modules), the Stanford library's (`HF_ColBERT` with artifact.metadata) and bge-m3's
second head. Missing settings get sentence-transformers' defaults.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ModelFileError
from shoal.models.convert.contract.dense import TOKENS, check_names, read_dense
from shoal.models.convert.contract.entries import MODULES, Entry, module_config
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.lengths import LONGEST, LONGEST_QUERY, Length, within
from shoal.models.convert.contract.saved import SAVED
from shoal.models.convert.contract.sparse import linear_file
from shoal.models.convert.contract.types import Dense, Late
from shoal.models.convert.contract.vocabulary import Vocabulary
from shoal.models.convert.contract.weights import open_weights
from shoal.specs import MultiSpec

COLBERT_LINEAR = "colbert_linear.safetensors"
METADATA = "artifact.metadata"
STANFORD = "HF_ColBERT"
MODEL_TYPES = ("ColBERT", "MultiVectorEncoder")
SETTINGS = ("query_length", "document_length", "query_expansion")
"""Settings of the Transformer module; PyLate stores them with its others."""

_QUERY_LENGTH = 32
_PYLATE = frozenset(
    {
        "query_prefix",
        "document_prefix",
        "query_length",
        "document_length",
        "attend_to_expansion_tokens",
        "attend_to_mask_tokens",
        "skiplist_words",
        "do_query_expansion",
    }
)
_MASKS = ("[MASK]", "<mask>")
_EXPANSION = frozenset({"strategy", "attend", "token", "length"})
_MASK_KEYS = frozenset({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"})


class LateHead(NamedTuple):
    """The head, and the prompts for markers that are not tokens."""

    late: Late
    prompts: dict[str, str]


class _Layout(NamedTuple):
    """What the files say of queries and documents. `fill` None: queries are not padded; "": with the mask token."""

    query_prefix: str = ""
    document_prefix: str = ""
    query_length: Length | None = None
    document_length: Length | None = None
    fill: str | None = None
    attended: bool = False
    words: tuple[str, ...] = ()


def is_late(folder: Path, entries: tuple[Entry, ...]) -> bool:
    """Whether modules.json and the files beside it are those of a late-interaction model."""
    if any(entry.pylate or entry.kind == "MultiVectorMask" for entry in entries):
        return True
    saved = read_object(folder, SAVED)
    return saved is not None and (saved.data.get("model_type") in MODEL_TYPES or bool(_PYLATE & set(saved.data)))


def read_late(folder: Path, entries: tuple[Entry, ...], width: int, sentence: JsonFile | None) -> LateHead:
    """Read the head over token vectors of `width` (0: unknown); `sentence` holds the Transformer's own settings.

    Raises ModelFileError for modules and settings that would change the vectors.
    """
    saved = read_object(folder, SAVED) or JsonFile(SAVED, {})
    native = saved.data.get("model_type") == "MultiVectorEncoder"
    layers, mask = _modules(folder, entries, native)
    dimension = _check_widths(layers, width)
    prefix = f"{entries[0].path}/" if entries[0].path else ""
    vocabulary = Vocabulary(folder, prefix)
    layout = _native(sentence, mask) if native else _pylate(saved)
    return _build_head(layout, layers, dimension, vocabulary, saved.name)


def read_stanford(folder: Path, width: int) -> LateHead:
    """Read the head of a Stanford checkpoint: `linear.weight` among the encoder's own weights."""
    found = read_object(folder, METADATA)
    saved = found or JsonFile(METADATA, {})
    if saved.text("similarity", "cosine") != "cosine":
        raise saved.refuse("similarity", f"{saved.data['similarity']!r} is not supported, only 'cosine' is")
    weights = open_weights(folder)
    out, into = weights.table("linear.weight")
    if width and into != width:
        raise ModelFileError(
            f"expects {into} dimensions, but its input has {width}", file=weights.where, key="linear.weight"
        )
    layer = Dense(path="", in_features=into, out_features=out, bias=False, activation="identity")
    layout = _Layout(
        query_prefix=saved.text("query_token_id", "[unused0]"),
        document_prefix=saved.text("doc_token_id", "[unused1]"),
        query_length=_query_length(saved, "query_maxlen"),
        document_length=_length(saved, "doc_maxlen", LONGEST),
        fill="",
        attended=saved.boolean("attend_to_mask_tokens", False),
        words=tuple(string.punctuation) if saved.boolean("mask_punctuation", True) else (),
    )
    return _build_head(layout, (layer,), out, Vocabulary(folder), saved.name)


def read_m3(folder: Path, prefix: str, width: int) -> Late | None:
    """Read bge-m3's head of token vectors; None without its file."""
    name = f"{prefix}{COLBERT_LINEAR}"
    if not (folder / name).is_file():
        return None
    layer = linear_file(folder, name, width, "identity")
    return Late(layers=(layer,), spec=MultiSpec(dimension=layer.out_features, drop_first=True))


def _modules(folder: Path, entries: tuple[Entry, ...], native: bool) -> tuple[tuple[Dense, ...], JsonFile | None]:
    layers: list[Dense] = []
    mask: JsonFile | None = None
    normalized = not native
    for entry in entries[1:]:
        if entry.kind == "Dense" and (not normalized or not native):
            layers.append(read_dense(folder, entry, of=TOKENS, unsaid=TOKENS))
        elif entry.kind == "MultiVectorMask" and native and mask is None:
            mask = module_config(folder, entry)
        elif entry.kind == "Normalize" and native:
            check_names(module_config(folder, entry), of=TOKENS)
            normalized = True
        elif entry.kind != "Dropout":
            raise ModelFileError(
                f"a {entry.kind} is not supported at this place in a late-interaction model",
                file=MODULES,
                key=entry.where,
            )
    if not normalized:
        raise ModelFileError(
            "the model does not end in a Normalize of token_embeddings: MaxSim needs unit vectors; add one and save "
            "it again",
            file=MODULES,
        )
    return tuple(layers), mask


def _check_widths(layers: tuple[Dense, ...], width: int) -> int:
    for layer in layers:
        if width and layer.in_features != width:
            raise ModelFileError(
                f"expects {layer.in_features} dimensions, but its input has {width}",
                file=f"{layer.path}/config.json",
                key="in_features",
            )
        width = layer.out_features
    return width


def _pylate(saved: JsonFile) -> _Layout:
    expansion = saved.section("query_expansion")
    length, fill, attended = _query_length(saved, "query_length"), None, False
    if expansion.data:
        length, fill, attended = _expansion(expansion)
    elif saved.boolean("do_query_expansion", True):
        older = saved.boolean("attend_to_mask_tokens", False)
        fill, attended = "", saved.boolean("attend_to_expansion_tokens", older)
    return _Layout(
        query_prefix=saved.text("query_prefix", "[Q] "),
        document_prefix=saved.text("document_prefix", "[D] "),
        query_length=length,
        document_length=_length(saved, "document_length", LONGEST),
        fill=fill,
        attended=attended,
        words=_words(saved, string.punctuation),
    )


def _native(sentence: JsonFile | None, mask: JsonFile | None) -> _Layout:
    """Read the layout of a MultiVectorEncoder. Its markers are prompts, so there are none to insert."""
    settings = sentence or JsonFile("sentence_bert_config.json", {})
    query = _length(settings, "query_length", LONGEST_QUERY)
    document = _length(settings, "document_length", LONGEST)
    fill: str | None = None
    attended, words = False, tuple[str, ...]()
    if "query_expansion" in settings:
        if mask is None:
            raise settings.refuse(
                "query_expansion", f"needs a MultiVectorMask in {MODULES}, which accounts for the tokens that it adds"
            )
        query, fill, attended = _expansion(settings.section("query_expansion"))
    if mask is not None:
        mask.only(_MASK_KEYS)
        if "keep_only_token_ids" in mask:
            raise mask.refuse("keep_only_token_ids", "an allowlist of tokens is only for images and is not supported")
        words = _words(mask, "")
        if words and mask.data.get("skiplist_tasks") not in (None, "document", ["document"]):
            raise mask.refuse("skiplist_tasks", "only documents can have a skiplist")
    return _Layout(query_length=query, document_length=document, fill=fill, attended=attended, words=words)


def _length(config: JsonFile, key: str, maximum: int) -> Length | None:
    """Return a length, None if not stated; it must have room for a marker and the special tokens."""
    if key not in config:
        return None
    return Length(within(config.integer(key, least=3), config.name, key, maximum), config.name, key)


def _query_length(config: JsonFile, key: str) -> Length:
    return _length(config, key, LONGEST_QUERY) or Length(_QUERY_LENGTH, config.name, key)


def _expansion(config: JsonFile) -> tuple[Length, str, bool]:
    """Return length, fill token and whether it is attended."""
    config.only(_EXPANSION)
    strategy = config.text("strategy")
    if strategy != "fixed":
        raise config.refuse("strategy", f"{strategy!r} is not supported, only 'fixed' is")
    key = "query_expansion.length"
    length = Length(within(config.integer("length"), config.name, key, LONGEST_QUERY), config.name, key)
    return length, config.text("token", ""), config.boolean("attend", False)


def _words(config: JsonFile, default: str) -> tuple[str, ...]:
    words: Any = config.data.get("skiplist_words")
    if words is None:
        return tuple(default)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise config.refuse("skiplist_words", "must be a list of strings")
    return tuple(words)


def _build_head(
    layout: _Layout, layers: tuple[Dense, ...], dimension: int, vocabulary: Vocabulary, file: str
) -> LateHead:
    unknown = vocabulary.unknown
    skipped = {vocabulary.id(word) for word in layout.words} - {None, unknown}
    query, query_prompt = _marker(vocabulary, layout.query_prefix)
    document, document_prompt = _marker(vocabulary, layout.document_prefix)
    spec = MultiSpec(
        dimension=dimension,
        query_marker=query,
        document_marker=document,
        query_length=layout.query_length.tokens if layout.query_length else None,
        document_length=layout.document_length.tokens if layout.document_length else None,
        fill_id=_fill(vocabulary, layout.fill, file),
        attended=layout.attended,
        skipped=tuple(sorted(i for i in skipped if i is not None)),
    )
    prompts = {"query": query_prompt, "document": document_prompt}
    late = Late(layers=layers, spec=spec, query_length=layout.query_length, document_length=layout.document_length)
    return LateHead(late, {name: text for name, text in prompts.items() if text})


def _marker(vocabulary: Vocabulary, prefix: str) -> tuple[int | None, str]:
    """Return the token that equals a prefix, else the prefix as text to prepend, as sentence-transformers does."""
    if not prefix.strip():
        return None, ""
    found = vocabulary.id(prefix)
    if found is None:
        found = vocabulary.id(prefix.strip())
    return (None, prefix) if found is None else (found, "")


def _fill(vocabulary: Vocabulary, token: str | None, file: str) -> int | None:
    if token is None:
        return None
    if token:
        found = vocabulary.id(token)
        if found is None:
            raise ModelFileError(f"{token!r} is no token", file=file, key="query_expansion.token")
        return found
    candidates = (vocabulary.special("mask"), *map(vocabulary.id, _MASKS), vocabulary.special("eos"))
    found = next((i for i in candidates if i is not None), None)
    if found is None:
        raise ModelFileError("queries are padded with a mask token, but the tokenizer has none", file=vocabulary.name)
    return found
