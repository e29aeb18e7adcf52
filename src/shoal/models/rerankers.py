"""Language models that are published as rerankers: their names, and a mark in the folder of one that is read so.

Their files are those of any language model, so that only a name, or an address with `#reranker=FORM`, tells one apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.decoding import json_decoder

MARK = "shoal_reranker.json"
"""Names, in a model's folder, the form in which it is read as a reranker."""


class RerankerForm(NamedTuple):
    """How a family of models was published: `architecture` of its config.json, and its `models` on the hub."""

    architecture: str
    models: tuple[str, ...]


FORMS = {
    "qwen3": RerankerForm("Qwen3ForCausalLM", tuple(f"Qwen/Qwen3-Reranker-{size}B" for size in ("0.6", "4", "8"))),
    "bge": RerankerForm("GemmaForCausalLM", ("BAAI/bge-reranker-v2-gemma",)),
    "mxbai": RerankerForm(
        "Qwen2ForCausalLM", ("mixedbread-ai/mxbai-rerank-base-v2", "mixedbread-ai/mxbai-rerank-large-v2")
    ),
}

_NAMES = {model: form for form, published in FORMS.items() for model in published.models}
ADVICE = (
    f"For a model that was trained as a reranker, add its form to the address: #reranker={' or #reranker='.join(FORMS)}"
)


class _Config(msgspec.Struct):
    architectures: list[str] = []
    name: str = msgspec.field(name="_name_or_path", default="")


_CONFIG = json_decoder(_Config)


def recognize_name(model: str) -> str:
    """Return the form of a model on the hub, "" for one that is not known as a reranker."""
    return _NAMES.get(model, "")


def recognize_folder(folder: Path, name: str) -> str:
    """Return the form of the model in `folder`, "" unless it is known to be a reranker.

    It is if `_name_or_path` of config.json is the name of one, or `name` is, with or without its organization, and the
    architecture is that model's too.
    """
    try:
        config = _CONFIG.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # the loader reports what is wrong with the file
    short = {model.rpartition("/")[2]: form for model, form in _NAMES.items()}
    form = _NAMES.get(config.name) or _NAMES.get(name) or short.get(name) or ""
    return form if form and config.architectures[:1] == [FORMS[form].architecture] else ""


def is_marked(names: Iterable[str]) -> bool:
    """Whether a folder with these files is read as a reranker."""
    return MARK in names


def mark_folder(folder: Path, form: str) -> None:
    """Write the mark, in place of one that may be a link to the user's file. Raises OSError."""
    (folder / MARK).unlink(missing_ok=True)
    (folder / MARK).write_bytes(msgspec.json.encode({"form": form}))
