"""Look up token ids by name in a tokenizer's files, for the markers, fill tokens and special tokens of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, is_there, read_lines, read_object

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class Vocabulary:
    """The tokens of tokenizer.json, or of vocab.txt without it. `prefix` is the path before their names."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.name = f"{prefix}tokenizer.json"
        self._settings = [file for name in SETTINGS if (file := read_object(folder, prefix + name)) is not None]
        self._model: dict[str, Any] = {}
        self._ids: dict[str, int] = {}
        self._file = read_object(folder, self.name)
        lines = f"{prefix}vocab.txt"
        if self._file is not None:
            self._read(self._file)
        elif is_there(folder, lines):
            self._ids = {word: index for index, word in enumerate(read_lines(folder, lines))}

    def id(self, token: str) -> int | None:
        """Return the id of a whole token, None if it is not a token."""
        return self._ids.get(token)

    def special(self, role: str) -> int | None:
        """Return the id of the token that the settings name for a role ("mask", "cls", ...), None if they name none."""
        for file in self._settings:
            named = file.data.get(f"{role}_token")
            if isinstance(named, dict):
                named = named.get("content")
            if isinstance(named, str) and named in self._ids:
                return self._ids[named]
        return None

    @property
    def unknown(self) -> int | None:
        """The id that the tokenizer's own model uses for unknown tokens."""
        token = self._model.get("unk_token")
        if isinstance(token, str):
            return self._ids.get(token)
        number = self._model.get("unk_id")
        return number if _is_id(number) else None

    @property
    def limit(self) -> int | None:
        """The number of tokens to which the file cuts texts, None if it does not. Raises ModelFileError for an invalid
        one."""
        cut = self._file.object("truncation") if self._file is not None else {}
        key = "truncation.max_length"
        return JsonFile(self.name, {key: cut.get("max_length")}).integer(key, least=1) if cut else None

    def _read(self, file: JsonFile) -> None:
        self._model = file.object("model")
        listed = self._model.get("vocab", {})
        try:
            if isinstance(listed, dict):
                self._ids = dict(listed)
            elif isinstance(listed, list):
                # Unigram: pairs of token and score, in the order of their ids.
                self._ids = {pair[0]: index for index, pair in enumerate(listed) if isinstance(pair, list) and pair}
            self._ids |= {token["content"]: token["id"] for token in file.data.get("added_tokens") or []}
            sound = all(isinstance(token, str) and _is_id(number) for token, number in self._ids.items())
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise ModelFileError("is not a tokenizer of the tokenizers library; fetch the model again", file=file.name)


def _is_id(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
