"""Builds a language model's chat pipeline from its files: tokenizer, chat template, special tokens, context length.

The files are those of the Hugging Face Hub. Where several of them set the same value, precedence follows transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from shoal.config.settings import Settings
from shoal.errors import ConfigError, ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.special_tokens import read_special_tokens
from shoal.pipelines.chat.pipeline import ChatOptions, TextChatPipeline
from shoal.pipelines.chat.template import ChatTemplate
from shoal.pipelines.chat.vocabulary import Vocabulary

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_CONTEXT_TOKENS = 1 << 30
"""Values at or above this are not limits: a tokenizer without a limit states a number beyond any context length."""

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


def load_chat_pipeline(
    folder: Path | None,
    settings: Settings,
    *,
    template: str | None = None,
    adapters: Collection[str] = (),
    context_tokens: int | None = None,
    cuts: bool = False,
) -> TextChatPipeline:
    """Build the pipeline of the model whose tokenizer files are in `folder` (None: it has no files). Blocks.

    `template` is the chat template to use where neither the settings nor the files have one. `adapters` are LoRAs of
    the model: they share its tokenizer and template. `context_tokens` overrides the files. `cuts`: the backend accepts
    no limit on the answer's length. Raises ModelFileError, with file and key, for broken files, and ConfigError for a
    broken chat template in the settings.
    """
    files = _ModelFiles(folder)
    vocabulary = files.vocabulary()
    templates = _templates_from_settings(settings, files) or files.templates()
    if not templates and template is not None:
        templates = {"default": files.compile_template(template)}
    kind = settings.tool_call_parser
    options = ChatOptions(
        tool_parser=None if kind == "none" else kind,
        reasoning=settings.reasoning_parser,
        context_tokens=context_tokens or files.context_tokens(),
        truncation=settings.prompt_truncation,
        answer_tokens=settings.default_max_tokens,
        cuts=cuts,
        ignore=frozenset(settings.ignore_parameters),
    )
    default = templates.get("default") or next(iter(templates.values()), None)
    return TextChatPipeline(vocabulary, default, options, tools_template=templates.get("tool_use"))


def load_generation_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling that generation_config.json recommends, by Sampling's field names. Neutral and missing values
    are left out. Raises ModelFileError."""
    found = read_object(folder, "generation_config.json")
    if found is None:
        return {}
    made: dict[str, Any] = {}
    if found.boolean("do_sample", True):
        made = {key: found.number(key) for key in _SAMPLING_KEYS if found.data.get(key)}
        if "top_k" in made:
            made["top_k"] = found.integer("top_k")
    penalty = found.number("repetition_penalty", 1.0)
    return made if penalty == 1.0 else {**made, "repetition_penalty": penalty}


class _ModelFiles:
    """The parsed files of a folder. A missing file counts as empty."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._tokenizer = self._read(TOKENIZER_CONFIG)
        self._config = self._read("config.json")
        self._generation = self._read("generation_config.json")
        self.special_tokens = read_special_tokens(self._read("special_tokens_map.json"), self._tokenizer)

    def vocabulary(self) -> Vocabulary | None:
        if self._folder is None:
            return None
        bos = self.special_tokens.get("bos_token")
        ends = [*_eos_ids(self._generation), *_eos_ids(self._config)]
        eos = self.special_tokens.get("eos_token")
        return Vocabulary(self._folder, TOKENIZER, bos_token=bos, eos_token=eos, eos_ids=ends)

    def context_tokens(self) -> int | None:
        text = self._config.data.get("text_config")
        configs = [self._config.data, text if isinstance(text, dict) else {}]
        limits = [config.get(key) for config in configs for key in _CONTEXT_KEYS]
        limits.append(self._tokenizer.data.get("model_max_length"))
        return next(
            (int(each) for each in limits if isinstance(each, int | float) and 0 < each < MAX_CONTEXT_TOKENS), None
        )

    def templates(self) -> dict[str, ChatTemplate]:
        """Compile the templates by name: "default", and "tool_use" if the model has a separate template for tools."""
        if self._folder is None:
            return {}
        made: dict[str, ChatTemplate] = {}
        for file, key, name, source in [*self._templates_in_files(self._folder), *self._templates_in_json()]:
            if name not in made:
                try:
                    made[name] = self.compile_template(source)
                except ConfigError as error:
                    why = f"{error.message}; set another template with chat_template"
                    raise ModelFileError(why, file=file, key=key) from error
        return made

    def compile_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, special_tokens=self.special_tokens)

    def _templates_in_files(self, folder: Path) -> list[tuple[str, str | None, str, str]]:
        named = {"default": "chat_template.jinja"}
        more = folder / "additional_chat_templates"
        named |= {path.stem: f"{more.name}/{path.name}" for path in sorted(more.glob("*.jinja"))}
        return [
            (file, None, name, _read_text_file(folder / file, file))
            for name, file in named.items()
            if (folder / file).is_file()
        ]

    def _templates_in_json(self) -> list[tuple[str, str | None, str, str]]:
        """Read `chat_template`, which is a text or a list of named templates."""
        made: list[tuple[str, str | None, str, str]] = []
        for file in (self._read("chat_template.json"), self._tokenizer):
            value = file.data.get("chat_template")
            entries = value if isinstance(value, list) else [] if value is None else [{"template": value}]
            for entry in entries:
                source = entry.get("template") if isinstance(entry, dict) else None
                if not isinstance(source, str):
                    raise file.refuse("chat_template", "must be a text, or a list of objects with name and template")
                made.append((file.name, "chat_template", str(entry.get("name", "default")), source))
        return made

    def _read(self, name: str) -> JsonFile:
        found = read_object(self._folder, name) if self._folder is not None else None
        return found or JsonFile(name, {})


def _templates_from_settings(settings: Settings, files: _ModelFiles) -> dict[str, ChatTemplate]:
    if settings.chat_template is None:
        return {}
    path = Path(settings.chat_template).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path} cannot be read as text: {error}", param="chat_template") from error
    try:
        return {"default": files.compile_template(source)}
    except ConfigError as error:
        raise ConfigError(f"chat_template: {path}: {error.message}", param="chat_template") from error


def _read_text_file(path: Path, file: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"is not UTF-8: {error}", file=file) from error


def _eos_ids(file: JsonFile) -> list[int]:
    value = file.data.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise file.refuse("eos_token_id", f"must be a token id or a list of them, not {value!r}")
    return values
