"""Read the tokenizer of a dual encoder: where texts end, how they are padded, and how they are cleaned.

SigLIP attends to its padding, so a wrong pad token gives wrong vectors. It is read as transformers does, from
tokenizer_config.json, and never from config.json, whose pad_token_id is another family's default. open_clip states the
cleaning and the maximum length of texts in its own settings, and pads on the right whatever the tokenizer says.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, is_there, read_object
from shoal.models.convert.contract.lengths import read_tokenizer_limit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Clean: TypeAlias = Literal["lower", "whitespace", "canonicalize"]
"""open_clip's names for the cleaning of a text: lowercase, white space only, or lowercase without punctuation."""

CLEANS: tuple[Clean, ...] = get_args(Clean)
FILE = "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
SETTINGS = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_CANONICAL = "SiglipTokenizer"
_GEMMA = ("GemmaTokenizer", "Siglip2Tokenizer")
_T5 = "T5Tokenizer"
"""open_clip's class for the sentencepiece models of the first SigLIP."""

_PADS = {_CANONICAL: "</s>", _T5: "<pad>"} | dict.fromkeys(_GEMMA, "<pad>")
_ENDS = {_CANONICAL: "</s>", _T5: "</s>"} | dict.fromkeys(_GEMMA, "<eos>")
_START, _END = "<|startoftext|>", "<|endoftext|>"
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""The words of CLIP's tokenizer (github.com/openai/CLIP, simple_tokenizer.py)."""
_PROBE = "A,  b"


class TowerTokenizer(NamedTuple):
    """A tower's tokenizer. `max_tokens` counts special tokens; `lower_case` and `cleaning` are those of a TextSpec.
    `pad_id` is 0 for CLIP, where it is never seen."""

    file: str
    max_tokens: int
    pad_id: int = 0
    lower_case: bool = False
    cleaning: Literal["", "canonical"] = ""


def read_tower_tokenizer(
    folder: Path,
    *,
    family: Literal["clip", "siglip"],
    vocab_size: int,
    positions: int,
    eos_id: int | None,
    path: str = "",
    clean: Clean | None = None,
) -> TowerTokenizer:
    """Read the tokenizer's files in `folder / path`, for a tower of `positions`; `eos_id` is CLIP's (TextTower).
    `clean`: open_clip's setting, None for a transformers model.

    Raises ModelFileError, naming file and key, for missing, unknown or contradictory settings.
    """
    prefix = f"{path}/" if path else ""
    settings = read_object(folder, prefix + SETTINGS) or JsonFile(prefix + SETTINGS, {})
    if "auto_map" in settings:
        raise settings.refuse("auto_map", "the tokenizer contains custom code, which Shoal never runs")
    tokenizer = _open(folder, prefix, family)
    limit = read_tokenizer_limit(settings) if clean is None else None
    most = min(limit.tokens, positions) if limit is not None else positions
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise ModelFileError(
            f"has {size} tokens, but the model has {vocab_size}", file=prefix + FILE, key="model.vocab"
        )
    if tokenizer.num_special_tokens_to_add(False) >= most:
        raise settings.refuse("model_max_length", f"{most} tokens leave no room for a text besides its special tokens")
    cleaned = tokenizer.normalizer.normalize_str(_PROBE) if tokenizer.normalizer else _PROBE
    cased, stops = cleaned != cleaned.lower(), "," in cleaned
    if clean is not None:
        cleaning: Literal["", "canonical"] = "canonical" if clean == "canonicalize" and stops else ""
        lower = clean != "whitespace" and cased
    if family == "clip":
        _check_end(tokenizer, eos_id, prefix + FILE)
        return TowerTokenizer(FILE, most) if clean is None else TowerTokenizer(FILE, most, 0, lower, cleaning)
    kind = _kind(settings, tokenizer, known=_PADS.keys() - {_T5} if clean is None else _PADS.keys())
    if clean is None:
        _check_padding_side(settings, kind)
        cleaning = "canonical" if kind == _CANONICAL and stops else ""
        lower = settings.boolean("do_lower_case", True) and cased
    pad = _token(folder, settings, "pad_token", _PADS[kind])
    pad_id = tokenizer.token_to_id(pad)
    if pad_id is None:
        raise settings.refuse("pad_token", f"{pad!r} is not a token in {FILE}; fetch the tokenizer's files again")
    _check_frame(folder, settings, tokenizer, kind)
    return TowerTokenizer(FILE, most, pad_id=pad_id, lower_case=lower, cleaning=cleaning)


def write_tower_tokenizer(folder: Path, target: Path, *, family: Literal["clip", "siglip"], path: str = "") -> None:
    """Write the tokenizer of `folder / path` to `target`: tokenizer.json unchanged, or one built from CLIP's vocabulary
    and merges. Raises ModelFileError if neither exists."""
    prefix = f"{path}/" if path else ""
    if is_there(folder, prefix + FILE):
        target.write_bytes((folder / (prefix + FILE)).read_bytes())
    else:
        target.write_text(_open(folder, prefix, family).to_str(pretty=False), encoding="utf-8")


def _open(folder: Path, prefix: str, family: Literal["clip", "siglip"]) -> Tokenizer:
    from tokenizers import Tokenizer

    name = prefix + FILE
    if not is_there(folder, name):
        if family == "clip" and all(is_there(folder, prefix + each) for each in (VOCABULARY, MERGES)):
            return _build(folder, prefix)
        raise ModelFileError(
            f"is missing, and so is {VOCABULARY} or {MERGES}; use a revision that has them, or copy those of "
            "openai/clip-vit-base-patch32 into the folder: all models with CLIP's own vocabulary share them"
            if family == "clip"
            else "is missing, and a sentencepiece model or vocabulary alone is not supported; use a revision that has "
            "it, or save the tokenizer with transformers' AutoTokenizer(..., use_fast=True).save_pretrained",
            file=name,
        )
    try:
        tokenizer = Tokenizer.from_file(str(folder / name))
    except Exception as error:  # the tokenizers library raises plain Exception for everything that is wrong in the file
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=name) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _build(folder: Path, prefix: str) -> Tokenizer:
    """Build CLIP's tokenizer from the two files, as transformers does."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    name, merges = prefix + VOCABULARY, prefix + MERGES
    settings = read_object(folder, prefix + SETTINGS) or JsonFile(prefix + SETTINGS, {})
    start, end, unknown = (
        _token(folder, settings, key, default)
        for key, default in (("bos_token", _START), ("eos_token", _END), ("unk_token", _END))
    )
    try:
        model = models.BPE.from_file(
            str(folder / name), str(folder / merges), unk_token=unknown, end_of_word_suffix="</w>"
        )
    except Exception as error:  # bare Exception for anything wrong in either file
        raise ModelFileError(
            f"and {merges} are not a valid vocabulary ({error}); fetch the model again", file=name
        ) from None
    tokenizer = Tokenizer(model)
    ids = {token: found for token in (start, end) if (found := tokenizer.token_to_id(token)) is not None}
    if len(ids) < len({start, end}):
        raise ModelFileError(f"does not hold the tokens {start!r} and {end!r}; fetch the model again", file=name)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ids])
    tokenizer.post_processor = processors.RobertaProcessing(
        (end, ids[end]), (start, ids[start]), trim_offsets=False, add_prefix_space=False
    )
    return tokenizer


def _kind(settings: JsonFile, tokenizer: Tokenizer, known: Collection[str]) -> str:
    """Return the tokenizer class: SigLIP's own, or Gemma's for SigLIP 2."""
    if "tokenizer_class" not in settings:
        return _CANONICAL
    kind = settings.text("tokenizer_class").removesuffix("Fast")
    if kind in ("PreTrainedTokenizer", "TokenizersBackend"):
        return _CANONICAL if tokenizer.token_to_id(_PADS[_GEMMA[0]]) is None else _GEMMA[0]
    if kind not in known:
        raise settings.refuse("tokenizer_class", f"{kind!r} is not supported; Shoal knows {', '.join(sorted(known))}")
    return kind


def _check_padding_side(settings: JsonFile, kind: str) -> None:
    """Reject padding on the left, Gemma's default unless stated otherwise; SigLIP 2 was trained with padding on the
    right."""
    if settings.text("padding_side", "left" if kind in _GEMMA else "right") != "right":
        raise settings.refuse(
            "padding_side",
            "Shoal pads texts on the right, but these files pad on the left; if the model was trained with right "
            'padding, like SigLIP 2, set "padding_side": "right"',
        )


def _check_frame(folder: Path, settings: JsonFile, tokenizer: Tokenizer, kind: str) -> None:
    """Check `add_bos_token` and `add_eos_token` against tokenizer.json: in transformers the former win."""
    ids = tokenizer.encode("").ids
    for key, name, default, found in (
        ("add_bos_token", "bos_token", "<bos>", ids[:1]),
        ("add_eos_token", "eos_token", _ENDS[kind], ids[-1:]),
    ):
        if key not in settings:
            continue
        token = tokenizer.token_to_id(_token(folder, settings, name, default))
        if settings.boolean(key) != (found == [token]):
            raise settings.refuse(key, f"{FILE} differs; save the tokenizer again with transformers")


def _check_end(tokenizer: Tokenizer, eos_id: int | None, file: str) -> None:
    """Check that every text has an end token, where CLIP's vectors are read."""
    ids = tokenizer.encode("").ids
    end = max(ids, default=None) if eos_id is None else eos_id
    if not ids or ids[-1] != end or ids.index(ids[-1]) != len(ids) - 1:
        raise ModelFileError(
            f"texts do not end in the token {end}, whose vector the model uses; save the tokenizer again with "
            "transformers, or correct the id of the end token in the model's settings",
            file=file,
            key="post_processor",
        )


def _token(folder: Path, settings: JsonFile, key: str, default: str) -> str:
    """Return a special token, given as text or as the object that transformers may write instead."""
    for config in (settings, read_object(folder, settings.name.replace(SETTINGS, _SPECIAL))):
        if config is not None and key in config:
            stated = config.data[key]
            return JsonFile(config.name, stated if isinstance(stated, dict) else {"content": stated}).text("content")
    return default
