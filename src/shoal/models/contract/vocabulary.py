"""Token ids by name, out of a tokenizer's files: the markers, fillers and special tokens that heads speak of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.errors import ModelFileError
from shoal.models.contract.json_file import JsonFile, read_object

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class Vocabulary:
    """The tokens of tokenizer.json, or of vocab.txt where there is none. `prefix` is the path before their names."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.name = f"{prefix}tokenizer.json"
        self._settings = [file for name in SETTINGS if (file := read_object(folder, prefix + name)) is not None]
        self._model: dict[str, Any] = {}
        self._ids: dict[str, int] = {}
        self.limit: int | None = None
        lines = folder / f"{prefix}vocab.txt"
        file = read_object(folder, self.name)
        if file is not None:
            self._read(file)
        elif lines.is_file():
            words = lines.read_text(encoding="utf-8").splitlines()
            self._ids = {word: index for index, word in enumerate(words)}

    def id(self, token: str) -> int | None:
        """The id of a whole token, None for what is none."""
        return self._ids.get(token)

    def special(self, role: str) -> int | None:
        """The id of the token that the settings name for a role ("mask", "cls", ...), None where they name none."""
        for file in self._settings:
            named = file.data.get(f"{role}_token")
            if isinstance(named, dict):
                named = named.get("content")
            if isinstance(named, str) and named in self._ids:
                return self._ids[named]
        return None

    @property
    def unknown(self) -> int | None:
        """The id that the tokenizer's own model gives to what it does not know."""
        token = self._model.get("unk_token")
        if isinstance(token, str):
            return self._ids.get(token)
        number = self._model.get("unk_id")
        return number if isinstance(number, int) else None

    def _read(self, file: JsonFile) -> None:
        self._model = file.object("model")
        listed = self._model.get("vocab", {})
        if isinstance(listed, dict):
            self._ids = dict(listed)
        elif isinstance(listed, list):
            # Unigram: pairs of token and score, in the order of their ids.
            self._ids = {pair[0]: index for index, pair in enumerate(listed) if isinstance(pair, list) and pair}
        added = file.data.get("added_tokens") or []
        try:
            self._ids |= {token["content"]: token["id"] for token in added}
            self.limit = int(file.object("truncation").get("max_length") or 0) or None
        except (KeyError, TypeError, ValueError):
            raise ModelFileError(
                "is no tokenizer of the tokenizers library; fetch the model again", file=file.name
            ) from None
