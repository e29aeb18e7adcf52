"""Read how a cross-encoder makes one text of a pair: with its chat template, where its files say so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.special_tokens import read_special_tokens
from shoal.specs import PairTemplate

_MODALITY = {"method": "forward", "method_output_name": "logits"}
_FORMATS = ("flat", "structured")
_FILE = "chat_template.jinja"
_RESERVED = frozenset({"padding", "truncation", "max_length", "return_tensors", "chat_template"})
"""Arguments of apply_chat_template that are no variables of a template."""


def check_inputs(sentence: JsonFile) -> None:
    """Raise ModelFileError, naming the key, unless the model reads texts, alone or as messages, and nothing else."""
    kinds = sentence.section("modality_config")
    kinds.only(frozenset({"text", "message"}))
    for kind in kinds.data:
        read = dict(kinds.object(kind))
        form = read.pop("format", "flat") if kind == "message" else "flat"
        if read != _MODALITY or form not in _FORMATS:
            raise kinds.refuse(kind, f"{kinds.data[kind]!r} is not supported")
    sentence.section("processing_kwargs").only(frozenset({"chat_template"}))


def read_template(folder: Path, prefix: str, sentence: JsonFile) -> PairTemplate | None:
    """Return the template of a model that reads messages, else None. `prefix`: the path before the names of its files.

    Raises ModelFileError for a model that reads messages and has no template.
    """
    reads = sentence.section("modality_config")
    if "message" not in reads:
        return None
    tokenizer = read_object(folder, f"{prefix}tokenizer_config.json") or JsonFile("tokenizer_config.json", {})
    source, file = _read_source(folder, prefix, tokenizer)
    arguments = sentence.section("processing_kwargs").section("chat_template")
    for key in sorted(_RESERVED & arguments.data.keys()):
        raise arguments.refuse(key, "is not supported; it may change the scores")
    if not arguments.boolean("restore_suffix", True):
        raise arguments.refuse("restore_suffix", "must be true: the end of the template is never cut")
    special = read_special_tokens(read_object(folder, f"{prefix}special_tokens_map.json"), tokenizer)
    variables = {"add_generation_prompt": False, "tools": None, "documents": None, **special, **arguments.data}
    variables.pop("restore_suffix", None)
    structured = reads.section("message").text("format", "flat") == "structured"
    return PairTemplate(source=source, file=file, structured=structured, variables=variables)


def _read_source(folder: Path, prefix: str, tokenizer: JsonFile) -> tuple[str, str]:
    """Return the default template, and its file."""
    path = folder / prefix / _FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), f"{prefix}{_FILE}"
        except UnicodeDecodeError as error:
            raise ModelFileError(f"is not text in UTF-8 ({error})", file=f"{prefix}{_FILE}") from None
    for file in (read_object(folder, f"{prefix}chat_template.json"), tokenizer):
        source = file.data.get("chat_template") if file else None
        if isinstance(source, list):
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, Mapping)}
            source = named.get("default")
        if file and isinstance(source, str):
            return source, file.name
    raise ModelFileError(
        "is missing, and the model reads pairs with it; fetch the model again", file=f"{prefix}{_FILE}"
    )
