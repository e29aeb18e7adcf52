"""Convert open_clip's tokenizers to one tokenizer.json, including their text cleaning.

Leaves out what no tokenizer.json can express: ftfy, which repairs wrongly decoded characters, and HTML entities.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.tower_tokenizer import CLEANS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def byte_pairs(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Sequence[str], clean: str = "lower"
) -> Tokenizer:
    """Build CLIP's byte-pair encoding over a byte-level vocabulary. The first two of the `special` tokens begin and end
    a text. `clean` is one of CLEANS."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(dict(vocabulary), list(merges), end_of_word_suffix="</w>"))
    tokenizer.normalizer = _cleaning(clean)
    splits = [
        pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    # Matched in the cleaned text, as open_clip does.
    tokenizer.add_special_tokens([AddedToken(token, normalized=True, special=True) for token in special])
    start, end = special[:2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(each, vocabulary[each]) for each in (start, end)]
    )
    return tokenizer


def with_cleaning(tokenizer: Tokenizer, clean: str) -> Tokenizer:
    """Add the cleaning of texts before the tokenizer's own normalization."""
    from tokenizers import normalizers

    steps = [_cleaning(clean)]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def without_end(tokenizer: Tokenizer, token: str, id_in_its_place: int) -> Tokenizer:
    """Return a tokenizer that frames texts with another id in place of `token` (open_clip's strip_sep_token). Raises
    ModelFileError if it does not frame texts with `token` in a known way."""
    from tokenizers import Tokenizer

    data: dict[str, Any] = json.loads(tokenizer.to_str())
    frame = data.get("post_processor") or {}
    kind = frame.get("type")
    if kind == "TemplateProcessing" and token in frame["special_tokens"]:
        frame["special_tokens"][token]["ids"] = [id_in_its_place]
    elif kind in ("BertProcessing", "RobertaProcessing") and frame["sep"][0] == token:
        frame["sep"] = [token, id_in_its_place]
    else:
        raise ModelFileError(
            f"texts do not end in {token!r} in a supported way; save the tokenizer again with transformers",
            file="tokenizer.json",
            key="post_processor",
        )
    return Tokenizer.from_str(json.dumps(data))


def check_options(options: JsonFile) -> str:
    """Return the cleaning that `tokenizer_kwargs` name, "" if none. Raises ModelFileError for any option that changes
    more, such as one that would let a tokenizer's own code run."""
    for name, value in options.data.items():
        if name not in ("clean", "strip_sep_token"):
            raise options.refuse(name, f"{value!r} is not supported; Shoal knows clean and strip_sep_token")
    clean = options.data.get("clean", "")
    if clean and clean not in CLEANS:
        raise options.refuse("clean", f"{clean!r} is not one of {', '.join(CLEANS)}")
    return str(clean)


def _cleaning(clean: str) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.NFC()]
    if clean == "canonicalize":
        marks = "".join(f"\\{mark}" for mark in string.punctuation)
        steps += [normalizers.Replace("_", " "), normalizers.Replace(Regex(f"[{marks}]"), "")]
    if clean in ("lower", "canonicalize"):
        steps.append(normalizers.Lowercase())
    steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps)
