"""Write the tokenizer.json of a served model: the model's own, or one built exactly from its vocabulary files.

transformers 5 takes only the vocabulary of a BERT, MPNet or RoBERTa tokenizer from tokenizer.json, and how texts are
normalized and split from tokenizer_config.json. Where the two disagree, this module follows transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract
from shoal.models.convert.contract.json_file import JsonFile, is_there, read_lines, read_object
from shoal.models.convert.contract.lengths import Length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_PROBES = ("", "a", "1", "the")
_WORDPIECE = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_BYTE_LEVEL = ("RobertaTokenizer",)
_CLASS_OF = {"bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "mpnet": "MPNetTokenizer"}
_CLASS_OF_TYPE = {"roberta": "RobertaTokenizer"}


def write_tokenizer(folder: Path, contract: Contract, target: Path) -> None:
    """Write the model's tokenizer to `target`.

    Raises ModelFileError if there is neither a tokenizer.json nor files that determine it exactly.
    """
    config = read_object(folder, contract.file("tokenizer_config.json")) or JsonFile(
        contract.file("tokenizer_config.json"), {}
    )
    kind = _class(folder, contract, config)
    source = contract.file(TOKENIZER)
    stored = read_object(folder, source)
    if stored is not None:
        changed = _follow_config(stored.data, kind, config) | _drop_unknown_tokens(stored.data, contract)
        target.write_bytes(_encode(stored.data) if changed else (folder / source).read_bytes())
    else:
        target.write_text(_build(folder, contract, kind, config).to_str(pretty=False), encoding="utf-8")
    _check(folder, target, source, contract)


def _class(folder: Path, contract: Contract, config: JsonFile) -> str:
    """Return the tokenizer class that transformers would use, without its "Fast"."""
    if "tokenizer_class" in config:
        return config.text("tokenizer_class").removesuffix("Fast")
    if contract.encoder is None:
        return ""
    if contract.encoder.family == "roberta":
        model = read_object(folder, contract.file("config.json"))
        return _CLASS_OF_TYPE.get(model.text("model_type"), "") if model else ""
    return _CLASS_OF.get(contract.encoder.family, "")


def _follow_config(data: dict[str, Any], kind: str, config: JsonFile) -> bool:
    """Apply tokenizer_config's settings to a tokenizer.json; return whether that changed anything."""
    model = data.get("model")
    model_type = model.get("type") if isinstance(model, dict) else None
    settings: dict[str, Any] = {}
    if kind in _WORDPIECE and model_type == "WordPiece":
        normalizer = {"type": "BertNormalizer", "clean_text": True, **_bert_normalizer(config)}
        settings = {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    elif kind in _BYTE_LEVEL and model_type == "BPE":
        spaced = config.boolean("add_prefix_space", False)
        splitter = {"type": "ByteLevel", "add_prefix_space": spaced, "trim_offsets": True, "use_regex": True}
        settings = {"normalizer": None, "pre_tokenizer": splitter}
    changes = {key: value for key, value in settings.items() if data.get(key) != value}
    data.update(changes)
    return bool(changes)


def _drop_unknown_tokens(data: dict[str, Any], contract: Contract) -> bool:
    """Remove added tokens without a row in the embeddings, such as those for images in a model of texts: they are read
    as other text. Return whether there were any."""
    added, encoder = data.get("added_tokens"), contract.encoder
    if encoder is None or not isinstance(added, list):
        return False
    kept = [each for each in added if not (isinstance(each, dict) and _is_beyond(each.get("id"), encoder.vocab_size))]
    data["added_tokens"] = kept
    return len(kept) < len(added)


def _is_beyond(id: object, size: int) -> bool:
    return isinstance(id, int) and id >= size


def _bert_normalizer(config: JsonFile) -> dict[str, Any]:
    """Return the settings by the tokenizers library's names, with transformers' defaults."""
    return {
        "handle_chinese_chars": config.boolean("tokenize_chinese_chars", True),
        "strip_accents": config.boolean("strip_accents") if "strip_accents" in config else None,
        "lowercase": config.boolean("do_lower_case", True),
    }


def _build(folder: Path, contract: Contract, kind: str, config: JsonFile) -> Tokenizer:
    vocabulary, merges = contract.file("vocab.txt"), contract.file("merges.txt")
    if kind in ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer") and is_there(folder, vocabulary):
        return _wordpiece(folder, vocabulary, config)
    if kind == "RobertaTokenizer" and is_there(folder, merges):
        return _byte_level(folder, contract.file("vocab.json"), merges, config)
    raise ModelFileError(
        "is missing and cannot be built exactly from the other files; load "
        "the tokenizer with transformers and save it again, which writes this file",
        file=contract.file(TOKENIZER),
    )


def _wordpiece(folder: Path, name: str, config: JsonFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate(read_lines(folder, name))}
    special = {key: _token(config, f"{key}_token", f"[{key.upper()}]") for key in ("unk", "sep", "pad", "cls", "mask")}
    settings = _bert_normalizer(config)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=True, **settings)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    cls, sep = special["cls"], special["sep"]
    _add_special(tokenizer, special, name)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    return tokenizer


def _byte_level(folder: Path, name: str, merges: str, config: JsonFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = read_object(folder, name)
    if vocabulary is None:
        raise ModelFileError(f"is missing, but {merges} exists; fetch the model again", file=name)
    lines = [line for line in read_lines(folder, merges) if line and not line.startswith("#version")]
    pairs = [tuple(line.split(" ", 1)) for line in lines]
    if odd := next((line for line, pair in zip(lines, pairs, strict=True) if len(pair) != 2), None):
        raise ModelFileError(f"must have two tokens in each line, not {odd[:80]!r}; fetch the model again", file=merges)
    defaults = {"cls": "<s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    special = {key: _token(config, f"{key}_token", value) for key, value in defaults.items()}
    try:
        model = models.BPE(
            vocab=vocabulary.data,
            merges=pairs,  # type: ignore[arg-type]
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    except Exception as error:  # the library raises various errors for invalid ids and for merges of unknown tokens
        raise ModelFileError(
            f"and {merges} are not a valid vocabulary ({_line(error)}); fetch the model again", file=name
        ) from None
    spaced = config.boolean("add_prefix_space", False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, special, name)
    tokenizer.post_processor = processors.RobertaProcessing(
        (special["sep"], vocabulary.data[special["sep"]]),
        (special["cls"], vocabulary.data[special["cls"]]),
        trim_offsets=config.boolean("trim_offsets", True),
        add_prefix_space=spaced,
    )
    return tokenizer


def _token(config: JsonFile, key: str, default: str) -> str:
    """Return a special token, which the file gives as a string or as an object with its content."""
    value = config.data.get(key)
    if isinstance(value, dict):
        return JsonFile(config.name, value).text("content")
    return config.text(key, default)


def _add_special(tokenizer: Tokenizer, special: dict[str, str], name: str) -> None:
    from tokenizers import AddedToken

    for key, token in special.items():
        if tokenizer.token_to_id(token) is None:
            raise ModelFileError(f"does not hold the {key} token {token!r}", file=name)
    # RoBERTa's mask token also absorbs the space before it.
    tokenizer.add_special_tokens(
        [AddedToken(token, lstrip=token == "<mask>", normalized=False, special=True) for token in special.values()]
    )


def _check(folder: Path, target: Path, source: str, contract: Contract) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(target))
    except Exception as error:  # the library raises a bare Exception for any file that it cannot read
        raise ModelFileError(f"is not readable ({error}); fetch the model again", file=source) from None
    size = contract.encoder.vocab_size if contract.encoder else contract.table.ids if contract.table else None
    largest = max(tokenizer.get_vocab(with_added_tokens=contract.table is not None).values(), default=0)
    if size is not None and largest >= size:
        raise ModelFileError(f"has token id {largest}, but the model's embeddings end at {size - 1}", file=source)
    if contract.table is None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        _check_frame(tokenizer, source, contract.vocab_size, _segments(folder, contract), contract)
        _check_room(tokenizer, contract)


def _segments(folder: Path, contract: Contract) -> int:
    """Return the number of segments that the model distinguishes, 0 if it gets no segment ids."""
    if contract.classifier is None:
        return 0
    if contract.encoder is not None:
        return contract.encoder.token_types if contract.classifier.segments else 0
    config = read_object(folder, contract.file("config.json"))
    types = config.integer("type_vocab_size", 0) if config else 0
    return types if types > 1 else 0


def _check_frame(tokenizer: Tokenizer, source: str, size: int, segments: int, contract: Contract) -> None:
    """Raise ModelFileError if the tokens or segment ids around texts are outside the model's tables (0: unknown
    size)."""
    probes = [*_PROBES, *zip(_PROBES, reversed(_PROBES), strict=True)] if contract.classifier else [*_PROBES]
    for probe in probes:
        try:
            read = tokenizer.encode_batch([probe])[0]
        except Exception:  # bare Exception: a tokenizer without an unknown token fails on unknown words
            continue
        largest, segment = max(read.ids, default=0), max(read.type_ids, default=0)
        if size and largest >= size:
            raise ModelFileError(
                f"adds token id {largest} to texts, but the model's embeddings end at {size - 1}",
                file=source,
                key="post_processor",
            )
        if segments and segment >= segments:
            raise ModelFileError(
                f"uses the segment id {segment}, but the model has {segments} segments",
                file=source,
                key="post_processor",
            )


def _check_room(tokenizer: Tokenizer, contract: Contract) -> None:
    """Raise ModelFileError if the special tokens leave no room for one token of each text."""
    one, two = (tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
    limit = Length(contract.max_tokens, *contract.max_tokens_at)
    if not limit.tokens:  # a model that runs elsewhere, where no file states it
        return
    needs = [(limit, one + 1)]
    if contract.classifier is not None:
        needs.append((limit, two + 2))
    if contract.late is not None:
        spec = contract.late.spec
        sides = (
            (contract.late.query_length, spec.query_marker),
            (contract.late.document_length, spec.document_marker),
        )
        needs += [(length or limit, one + 1 + (marker is not None)) for length, marker in sides]
    for length, need in needs:
        if length.tokens < need:
            raise ModelFileError(
                f"{length.tokens} tokens leave no room for a text besides its special tokens: at least {need} are "
                "needed",
                file=length.file,
                key=length.key,
            )


def _line(error: Exception) -> str:
    """Return the first line of the library's message; further lines list each type that it would accept."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _encode(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
