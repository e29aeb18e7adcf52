"""The tokenizer of a model of two towers: where texts end, what fills them, and what is done to them first.

SigLIP attends to its padding, so that a wrong pad token gives wrong vectors: it is read as transformers does, from
tokenizer_config.json, and never from config.json, whose pad_token_id is another family's default.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from shoal.errors import ModelFileError
from shoal.models.contract.json_file import JsonFile, is_there, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_CANONICAL = "SiglipTokenizer"
_GEMMA = ("GemmaTokenizer", "Siglip2Tokenizer")
_PADS = {_CANONICAL: "</s>"} | dict.fromkeys(_GEMMA, "<pad>")
_ENDS = {_CANONICAL: "</s>"} | dict.fromkeys(_GEMMA, "<eos>")
_ENDLESS = 10**9
_PROBE = "A,  b"


class TowerTokenizer(NamedTuple):
    """`max_tokens` counts special tokens; `lower_case` and `cleaning` are those of a TextSpec. `pad_id` is 0 for CLIP,
    where it is never seen."""

    file: str
    max_tokens: int
    pad_id: int = 0
    lower_case: bool = False
    cleaning: Literal["", "canonical"] = ""


def read_tower_tokenizer(
    folder: Path, *, family: Literal["clip", "siglip"], vocab_size: int, positions: int, eos_id: int | None
) -> TowerTokenizer:
    """What the tokenizer's files say, for a tower of `positions`; `eos_id` is CLIP's (TextTower).

    Raises ModelFileError, naming file and key, for what is missing, unknown or contradictory.
    """
    settings = read_object(folder, SETTINGS) or JsonFile(SETTINGS, {})
    if "auto_map" in settings:
        raise settings.refuse("auto_map", "the tokenizer brings its own code, which Shoal never runs")
    tokenizer = _open(folder)
    most = _max_tokens(settings, positions)
    if tokenizer.get_vocab_size(with_added_tokens=True) > vocab_size:
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        raise ModelFileError(f"has {size} tokens, but the model {vocab_size}", file=FILE, key="model.vocab")
    if tokenizer.num_special_tokens_to_add(False) >= most:
        raise settings.refuse("model_max_length", f"{most} tokens leave no room for a text beside its special tokens")
    if family == "clip":
        _check_end(tokenizer, eos_id)
        return TowerTokenizer(FILE, most)
    kind = _kind(settings, tokenizer)
    _check_padding_side(settings, kind)
    pad = _token(folder, settings, "pad_token", _PADS[kind])
    pad_id = tokenizer.token_to_id(pad)
    if pad_id is None:
        raise settings.refuse("pad_token", f"{pad!r} is no token of {FILE}; fetch the tokenizer's files again")
    _check_frame(folder, settings, tokenizer, kind)
    cleaned = tokenizer.normalizer.normalize_str(_PROBE) if tokenizer.normalizer else _PROBE
    return TowerTokenizer(
        FILE,
        most,
        pad_id=pad_id,
        lower_case=settings.boolean("do_lower_case", True) and cleaned != cleaned.lower(),
        cleaning="canonical" if kind == _CANONICAL and "," in cleaned else "",
    )


def _open(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not is_there(folder, FILE):
        raise ModelFileError(
            "is missing, and a sentencepiece model or a vocabulary alone is not read; use a revision that has it, or "
            "save the tokenizer with transformers' AutoTokenizer(..., use_fast=True).save_pretrained",
            file=FILE,
        )
    try:
        tokenizer = Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # the tokenizers library raises plain Exception for everything that is wrong in the file
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=FILE) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _max_tokens(settings: JsonFile, positions: int) -> int:
    if "model_max_length" not in settings:
        return positions
    stated = settings.number("model_max_length")  # written as a float where it is 1e30
    if stated < 1:
        raise settings.refuse("model_max_length", f"must be at least 1 token, not {stated}")
    return min(int(stated), positions) if stated < _ENDLESS else positions


def _kind(settings: JsonFile, tokenizer: Tokenizer) -> str:
    """The class that transformers takes: SigLIP's own or Gemma's, which SigLIP 2 has."""
    if "tokenizer_class" not in settings:
        return _CANONICAL
    kind = settings.text("tokenizer_class").removesuffix("Fast")
    if kind in ("PreTrainedTokenizer", "TokenizersBackend"):
        return _CANONICAL if tokenizer.token_to_id(_PADS[_GEMMA[0]]) is None else _GEMMA[0]
    if kind not in _PADS:
        raise settings.refuse("tokenizer_class", f"{kind!r} is not read here; Shoal knows {', '.join(_PADS)}")
    return kind


def _check_padding_side(settings: JsonFile, kind: str) -> None:
    """Gemma's tokenizer fills a text on the left where nothing else is stated; SigLIP 2 was trained on the other."""
    if settings.text("padding_side", "left" if kind in _GEMMA else "right") != "right":
        raise settings.refuse(
            "padding_side",
            "texts are filled on the right here, and these files fill them on the left; if the model was trained on "
            'the right, as SigLIP 2 was, state "padding_side": "right"',
        )


def _check_frame(folder: Path, settings: JsonFile, tokenizer: Tokenizer, kind: str) -> None:
    """`add_bos_token` and `add_eos_token` against what tokenizer.json does: in transformers the first two win."""
    ids = tokenizer.encode("").ids
    for key, name, default, found in (
        ("add_bos_token", "bos_token", "<bos>", ids[:1]),
        ("add_eos_token", "eos_token", _ENDS[kind], ids[-1:]),
    ):
        if key not in settings:
            continue
        token = tokenizer.token_to_id(_token(folder, settings, name, default))
        if settings.boolean(key) != (found == [token]):
            raise settings.refuse(key, f"{FILE} does otherwise; save the tokenizer again with transformers")


def _check_end(tokenizer: Tokenizer, eos_id: int | None) -> None:
    """CLIP's vectors are read at the end of the text, so every text must have one."""
    ids = tokenizer.encode("").ids
    end = max(ids, default=None) if eos_id is None else eos_id
    if not ids or ids[-1] != end or ids.index(ids[-1]) != len(ids) - 1:
        raise ModelFileError(
            f"a text does not end in the token {end}, at which the model reads it; save the tokenizer again with "
            "transformers, or correct text_config.eos_token_id in config.json",
            file=FILE,
            key="post_processor",
        )


def _token(folder: Path, settings: JsonFile, key: str, default: str) -> str:
    """A special token, as text or as the object that transformers may write in its place."""
    for config in (settings, read_object(folder, _SPECIAL)):
        if config is not None and key in config:
            stated = config.data[key]
            return JsonFile(config.name, stated if isinstance(stated, dict) else {"content": stated}).text("content")
    return default
