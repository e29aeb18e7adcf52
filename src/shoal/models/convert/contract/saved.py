"""Read config_sentence_transformers.json: prompts, similarity and the kind of the saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.sparse import refuse_pruning

SAVED = "config_sentence_transformers.json"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
Kind: TypeAlias = Literal["dense", "sparse", "late", "scores"]
_MODEL_TYPES: dict[Kind, tuple[str, ...]] = {
    "dense": ("SentenceTransformer",),
    "sparse": ("SparseEncoder", "SentenceTransformer"),
    "late": ("MultiVectorEncoder", "ColBERT", "SentenceTransformer"),
    "scores": ("CrossEncoder",),
}
_WORDS: dict[Kind, str] = {
    "dense": "a dense text embedding model",
    "sparse": "a sparse text embedding model",
    "late": "a late-interaction model",
    "scores": "a cross-encoder",
}
_USUAL: dict[Kind, str] = {"dense": "cosine", "sparse": "dot", "late": "maxsim", "scores": "cosine"}


class SavedSettings(NamedTuple):
    """Settings of the file. `dimensions`: how many numbers of a vector to keep, None for all."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    dimensions: int | None = None


def read_saved(folder: Path, kind: Kind = "dense") -> SavedSettings:
    """Read the file of a model of that kind. Raises ModelFileError for another kind and for malformed values."""
    config = read_object(folder, SAVED)
    if config is None:
        return SavedSettings(similarity=_USUAL[kind])
    model_type = config.text("model_type", "SentenceTransformer")
    if model_type not in _MODEL_TYPES[kind]:
        raise config.refuse("model_type", f"{model_type!r} is not {_WORDS[kind]}")
    if kind == "sparse":
        refuse_pruning(config)
    prompts = {name: text for name, text in config.object("prompts").items() if text is not None}
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise config.refuse(f"prompts.{name}", f"must be a string, not {text!r}")
    default = config.text("default_prompt_name") if config.data.get("default_prompt_name") is not None else None
    if default is not None and default not in prompts:
        raise config.refuse("default_prompt_name", f"{default!r} is not among the prompts ({', '.join(prompts)})")
    dimensions = config.integer("truncate_dim", least=1) if "truncate_dim" in config else None
    return SavedSettings(prompts, default, _similarity(config, kind), dimensions)


def _similarity(config: JsonFile, kind: Kind) -> str:
    """Return the similarity. Late interaction always uses MaxSim, whatever an older library stored."""
    if kind == "late":
        return _USUAL[kind]
    similarity = config.text("similarity_fn_name", _USUAL[kind])
    if similarity not in SIMILARITIES:
        raise config.refuse("similarity_fn_name", f"{similarity!r} is not one of {', '.join(SIMILARITIES)}")
    return similarity
