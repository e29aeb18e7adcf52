"""Read the special tokens that a model's files name."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.models.convert.contract.json_file import JsonFile


def read_special_tokens(*files: JsonFile | None) -> dict[str, str]:
    """Return the special tokens by name: those of special_tokens_map.json and tokenizer_config.json, the last file's if
    several name one. Each is a text, or an object whose `content` is the text."""
    made: dict[str, str] = {}
    for file in filter(None, files):
        for name, value in file.data.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                made[name] = text
    return made
