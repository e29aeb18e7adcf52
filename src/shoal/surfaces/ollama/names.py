"""Translate model names of Ollama's clients: tags, hub addresses and names of Ollama's library. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping

from shoal.names import QUANTIZATION, quantized_name

_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")

_EMBEDDERS: dict[str, dict[str, str]] = {
    "sentence-transformers/all-MiniLM-L6-v2": {"all-minilm": "latest 22m l6-v2"},
    "sentence-transformers/all-MiniLM-L12-v2": {"all-minilm": "33m l12-v2"},
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": {"paraphrase-multilingual": "latest 278m"},
    "nomic-ai/nomic-embed-text-v1.5": {"nomic-embed-text": "latest v1.5"},
    "nomic-ai/nomic-embed-text-v2-moe": {"nomic-embed-text-v2-moe": "latest"},
    "mixedbread-ai/mxbai-embed-large-v1": {"mxbai-embed-large": "latest v1 335m"},
    "BAAI/bge-m3": {"bge-m3": "latest 567m"},
    "BAAI/bge-large-en-v1.5": {"bge-large": "latest 335m"},
    "Snowflake/snowflake-arctic-embed-l": {"snowflake-arctic-embed": "latest l 335m"},
    "Snowflake/snowflake-arctic-embed-m": {"snowflake-arctic-embed": "m 110m"},
    "Snowflake/snowflake-arctic-embed-s": {"snowflake-arctic-embed": "s 33m"},
    "Snowflake/snowflake-arctic-embed-xs": {"snowflake-arctic-embed": "xs 22m"},
    "Snowflake/snowflake-arctic-embed-l-v2.0": {"snowflake-arctic-embed2": "latest 568m"},
    "ibm-granite/granite-embedding-30m-english": {"granite-embedding": "latest 30m"},
    "ibm-granite/granite-embedding-278m-multilingual": {"granite-embedding": "278m"},
    "Qwen/Qwen3-Embedding-0.6B": {"qwen3-embedding": "0.6b"},
    "Qwen/Qwen3-Embedding-4B": {"qwen3-embedding": "4b"},
    "Qwen/Qwen3-Embedding-8B": {"qwen3-embedding": "latest 8b"},
    "google/embeddinggemma-300m": {"embeddinggemma": "latest 300m"},
}
"""Hub repositories, each with the names and tags of its model in Ollama's library."""

LIBRARY: Mapping[str, str] = {
    name if tag == "latest" else f"{name}:{tag}": repository
    for repository, names in _EMBEDDERS.items()
    for name, tags in names.items()
    for tag in tags.split()
}

_QUANTIZED = re.compile(
    r"(?:^|[-_.])(i?q\d(?:_[0-9k])?(?:_(?:xxs|xs|s|m|l|xl))?|int[48]|fp?16|bf16|fp?32|fp8|[48]bit)(?=$|[-_.])"
)
_FORMS = {"instruct", "it", "chat", "gguf", "ov", "onnx", "hf"}


def strip_tag(name: str) -> str:
    """Remove the tag `:latest` and the host of a hub address, which leaves org/name."""
    if name.count("/") > 1:
        for hub in _HUBS:
            name = name.removeprefix(hub)
    return name.removesuffix(_LATEST)


def add_tag(name: str, adapter: str = "") -> str:
    """Return the name as Ollama lists it, with the adapter or `latest` as its tag."""
    return f"{name}:{adapter}" if adapter else name + _LATEST


def split_quantization(name: str) -> tuple[str, str]:
    """Split `org/name:Q4_K_M` into name and upper-case tag. For any other tag, return the whole name and ""."""
    base, _, tag = name.rpartition(":")
    if base and (QUANTIZATION.fullmatch(tag) or _QUANTIZED.fullmatch(tag.lower())):
        return base, tag.upper()
    return name, ""


def to_served_name(name: str) -> str:
    """Return the name under which Shoal serves what a client names: without tag, or that of a quantization."""
    return quantized_name(*split_quantization(strip_tag(name)))


def show_name(name: str, source: str) -> str:
    """Return the name as Ollama writes it, without `latest`: a quantization is a tag. `source`: the model's address."""
    base, form = split_quantization(source.removeprefix("hf:").partition("@")[0])
    return f"{base}:{form}" if form and name == quantized_name(base, form) else add_tag(name)


def is_library_name(name: str, schemes: Container[str]) -> bool:
    """Whether an unknown name can only be one of Ollama's library: it has a tag, and the hub has none. `schemes` are
    those of addresses, which have a colon, too."""
    base, colon, _ = name.partition(":")
    return bool(colon) and "/" not in name and base not in schemes


def match_library_name(name: str, served: Mapping[str, Collection[str]]) -> str | None:
    """Find the served model that a name of Ollama's library means. `served` maps each model to all its names.

    Returns None if there is none, or if the name is ambiguous.
    """
    if repository := LIBRARY.get(name):
        return next((model for model, names in served.items() if repository in names), None)
    wanted = _normalize(name)
    found = [model for model, names in served.items() if wanted in map(_normalize, names)]
    return found[0] if len(found) == 1 else None


def _normalize(name: str) -> str:
    """Reduce a name to family, version and size: llama3.2:1b and bartowski/Llama-3.2-1B-Instruct-GGUF both become
    "llama3.21b"."""
    last = _QUANTIZED.sub("", name.rpartition("/")[2].lower().replace(":", "-"))
    return "".join(word for word in re.split("[-_]", last) if word not in _FORMS)
