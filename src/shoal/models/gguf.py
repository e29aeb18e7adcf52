"""Read the header of a GGUF file, and derive the JSON files that a transformers folder would have.

Format: github.com/ggml-org/ggml, docs/gguf.md. Supports only the files that OpenVINO GenAI runs: three architectures,
with a byte-level vocabulary.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Container
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ModelFileError
from shoal.names import gguf_parts

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}
"""Tensor kind to (weights, bytes) per block: F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16."""

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
"""Tokens that end an answer if they are control tokens: files often name only one of theirs."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}],
    "smollm": [{"type": "Digits", "individual_digits": True}],
}
_SPLITS["llama3"] = _SPLITS["llama-v3"] = _SPLITS["llama-bpe"]
_SPLITS["deepseek-r1-qwen"] = _SPLITS["qwen2"]
"""How texts are split before merges are applied, by llama.cpp's name for it; [] is GPT-2's own way."""

_OWN_REGEX = ("gpt-2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4
_ALIGNMENT = 32
_MOST_ENTRIES, _MOST_ITEMS, _MOST_BYTES = 2**16, 2**24, 2**26
"""Limits on the keys and tensors of a file, items of a list, and bytes of a text: far more than models have."""
_MOST_ALIGNMENT = 2**20
_MOST_DIMENSIONS = 4
_MOST_LAYERS = 2**14
_MOST_NUMBER = 2**31 - 1
_SHOWN = 60
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """A tensor's header. `shape` as in the file, the row length first; `kind`: key of BLOCKS."""

    name: str
    shape: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF header. `metadata` by its keys; `parameters`: total number of weights; `vocab_size`: rows of the token
    table."""

    name: str
    metadata: dict[str, Any]
    parameters: int
    vocab_size: int
    tensors: tuple[TensorInfo, ...] = ()

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str, default: int | None = None, *, maximum: int = _MOST_NUMBER) -> int:
        """Return a positive integer of the architecture's metadata. Raises ModelFileError."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= maximum:
            raise self.refuse(
                f"must be a whole number above 0, and at most {maximum}; fetch it again", f"{self.architecture}.{key}"
            )
        return value

    @property
    def cache_heads(self) -> tuple[tuple[int, int], ...]:
        """Return (heads, head width) of each cached key and value."""
        heads = self.number("attention.head_count")
        width = self.number("attention.key_length", max(1, self.number("embedding_length") // heads))
        each = (self.number("attention.head_count_kv", heads), width)
        return (each,) * (2 * self.number("block_count", maximum=_MOST_LAYERS))

    def refuse(self, why: str, key: str | None = None) -> ModelFileError:
        return ModelFileError(why, file=self.name, key=key)


def read_gguf(path: Path) -> Gguf:
    """Read the header, of all parts if it is the first of a split model, and check that all tensors are present and of
    a supported kind.

    Raises ModelFileError for a file that is not GGUF, is truncated, or contains something that OpenVINO GenAI does not
    run.
    """
    made = _read_header(path)
    if made.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise made.refuse(
            f"{_shorten(made.architecture)} is not supported as GGUF, only {known}: use a model with "
            "openvino_model.xml",
            "general.architecture",
        )
    count = _parts(made)
    if count <= 1:
        return made
    names = gguf_parts(path.name)
    if len(names) != count or path.name != names[0]:
        raise made.refuse(
            f"is one of {count} parts of a split model, which the engine finds by their names: name them "
            f"NAME-00001-of-{count:05}.gguf and so on, or join them: `llama-gguf-split --merge FIRST-PART NAME.gguf`",
            "split.count",
        )
    parts = [made]
    for name in names[1:]:
        if not path.with_name(name).is_file():
            raise ModelFileError(f"is missing, a part of the same model as {path.name}: fetch it too", file=name)
        parts.append(_read_header(path.with_name(name)))
        if _parts(parts[-1]) != count:
            raise parts[-1].refuse(f"must be {count}, as in {path.name}; fetch both again", "split.count")
    _check_parts(parts)
    return replace(
        made,
        parameters=sum(part.parameters for part in parts),
        vocab_size=max(part.vocab_size for part in parts),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
    )


def _check_parts(parts: list[Gguf]) -> None:
    """Check that each part has its place, and that they hold every tensor once. Raises ModelFileError."""
    for number, part in enumerate(parts):
        if part.metadata.get("split.no", number) != number:
            raise part.refuse(f"must be {number}: it is another part of the model; fetch it again", "split.no")
    names = [tensor.name for part in parts for tensor in part.tensors]
    expected = parts[0].metadata.get("split.tensors.count", len(names))
    if not len(set(names)) == len(names) == expected:
        raise parts[0].refuse(
            f"is {_shorten(expected)}, but the parts hold {len(names)} tensors with {len(set(names))} names: fetch all "
            "parts again",
            "split.tensors.count",
        )


def _parts(made: Gguf) -> int:
    """Return the number of files of the model. Raises ModelFileError."""
    parts = made.metadata.get("split.count", 0)
    if isinstance(parts, bool) or not isinstance(parts, int):
        raise made.refuse(f"must be a whole number, not {_shorten(parts)}; fetch it again", "split.count")
    return parts


def _read_header(path: Path) -> Gguf:
    with path.open("rb") as file:
        if not file.read(4) == b"GGUF":
            raise ModelFileError("is not a GGUF file; fetch the model again", file=path.name)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(path.name, data).read()
            except (struct.error, UnicodeDecodeError, OverflowError) as error:
                raise ModelFileError(f"is truncated or broken ({error}); fetch it again", file=path.name) from None


class _Reader:
    def __init__(self, name: str, data: mmap.mmap) -> None:
        self._name = name
        self._data = data
        self._offset = 4

    def read(self) -> Gguf:
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._refuse(f"has format version {version}; only 2 and 3 are supported")
        tensors, pairs = (self._check_length(self._scalar("Q"), _MOST_ENTRIES) for _ in range(2))
        metadata = {}
        for _ in range(pairs):
            key = self._text()
            metadata[key] = self._value(self._scalar("I"))
        return Gguf(self._name, metadata, *self._tensors(tensors, metadata))

    def _tensors(self, count: int, metadata: dict[str, Any]) -> tuple[int, int, tuple[TensorInfo, ...]]:
        """Return (total weights, rows of the token table, tensors), after checking that all tensors are within the
        file."""
        parameters = vocabulary = needed = 0
        found = []
        for _ in range(count):
            name = self._text()
            shape = self._shape(name)
            kind, offset = self._scalar("I"), self._scalar("Q")
            if kind not in BLOCKS:
                why = f"has weights of type {kind}: use the file in Q4_0, Q4_1, Q4_K_M, Q6_K, Q8_0 or F16"
                raise self._refuse(why, name[:_SHOWN])
            weights, size = BLOCKS[kind]
            parameters += prod(shape)
            needed = max(needed, offset + prod(shape) // weights * size)
            found.append(TensorInfo(name[:_SHOWN], tuple(shape), kind))
            if name == "token_embd.weight":
                vocabulary = shape[-1]
        step = self._alignment(metadata)
        begin = -(-self._offset // step) * step
        if begin + needed > len(self._data):
            raise self._refuse(f"is truncated: it has {len(self._data)} of {begin + needed} bytes; fetch it again")
        return parameters, vocabulary, tuple(found)

    def _shape(self, name: str) -> list[int]:
        count = self._scalar("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            why = f"has {count} dimensions instead of 1 to {_MOST_DIMENSIONS}; fetch it again"
            raise self._refuse(why, name[:_SHOWN])
        shape = [self._scalar("Q") for _ in range(count)]
        if 0 in shape:
            raise self._refuse("holds no weights; fetch it again", name[:_SHOWN])
        return shape

    def _alignment(self, metadata: dict[str, Any]) -> int:
        key = "general.alignment"
        step = metadata.get(key, _ALIGNMENT)
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= _MOST_ALIGNMENT or step & (step - 1):
            raise self._refuse(
                f"must be a power of two up to {_MOST_ALIGNMENT}, not {_shorten(step)}; fetch it again", key
            )
        return step

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(self._kind(kind))
        kind, count = self._scalar("I"), self._check_length(self._scalar("Q"), _MOST_ITEMS)
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        code = struct.Struct(f"<{count}{self._kind(kind)}")
        values = list(code.unpack_from(self._data, self._offset))
        self._offset += code.size
        return values

    def _kind(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._refuse(f"has a value of the unknown type {kind}; fetch it again")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        length = self._check_length(self._scalar("Q"), _MOST_BYTES)
        if self._offset + length > len(self._data):
            raise struct.error("a string ends beyond the file")
        text = self._data[self._offset : self._offset + length].decode()
        self._offset += length
        return text

    def _check_length(self, length: int, max_length: int) -> int:
        if length > max_length:
            raise struct.error(f"a length of {length}")
        return length

    def _refuse(self, why: str, key: str | None = None) -> ModelFileError:
        return ModelFileError(why, file=self._name, key=key)


def build_settings(model: Gguf) -> dict[str, dict[str, Any]]:
    """Build the JSON files that a transformers folder would have beside these weights, by name.

    Raises ModelFileError for a vocabulary that is not known exactly.
    """
    tokens = _strings(model, "tokenizer.ggml.tokens")
    kinds = _kinds(model, len(tokens))
    control = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL}
    named = {key: _find_token(model, tokens, key) for key in ("bos", "eos", "unknown", "padding", "eot")}
    stops = [tokens.index(token) for token in ENDS if token in control]
    stops += [tokens.index(token) for key in ("eos", "eot") if (token := named[key]) is not None]
    heads = model.number("attention.head_count")
    return {
        "tokenizer.json": _tokenizer(model, tokens, kinds, named["bos"]),
        "tokenizer_config.json": _without_none(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": named["bos"],
                "eos_token": named["eos"],
                "unk_token": named["unknown"],
                "pad_token": named["padding"],
                "chat_template": _text(model, "tokenizer.chat_template"),
                "clean_up_tokenization_spaces": False,
            }
        ),
        "config.json": {
            "architectures": [ARCHITECTURES[model.architecture]],
            "model_type": model.architecture,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.number("context_length"),
            "hidden_size": model.number("embedding_length"),
            "num_hidden_layers": model.number("block_count", maximum=_MOST_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": model.number("attention.head_count_kv", heads),
        },
        "generation_config.json": {"eos_token_id": sorted(set(stops))},
    }


def _tokenizer(model: Gguf, tokens: list[str], kinds: list[int], bos: str | None) -> dict[str, Any]:
    """Build tokenizer.json as the `tokenizers` library reads it."""
    if model.metadata.get("tokenizer.ggml.model") != "gpt2":
        raise model.refuse(
            'only byte-level BPE vocabularies ("gpt2") are supported in GGUF: choose a repository with '
            "openvino_model.xml",
            "tokenizer.ggml.model",
        )
    way = str(model.metadata.get("tokenizer.ggml.pre", "default"))
    if way not in _SPLITS:
        raise model.refuse(
            f"{_shorten(way)} does not define how texts are split: put tokenizer.json and tokenizer_config.json "
            "of the original model into the folder",
            "tokenizer.ggml.pre",
        )
    if model.metadata.get("tokenizer.ggml.add_eos_token", False) is not False:
        raise model.refuse(
            "prompts that end with the end token are not supported: put tokenizer.json and tokenizer_config.json "
            "of the original model into the folder",
            "tokenizer.ggml.add_eos_token",
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": way in _OWN_REGEX}
    added = [
        {"id": number, "content": token, "special": kind == _CONTROL, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    begins = model.metadata.get("tokenizer.ggml.add_bos_token", _SPLITS[way] is _SPLITS["llama-bpe"])
    if not isinstance(begins, bool):
        raise model.refuse(
            f"must be true or false, not {_shorten(begins)}; fetch it again", "tokenizer.ggml.add_bos_token"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if _SPLITS[way] is _SPLITS["qwen2"] else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_SPLITS[way], letters]},
        "post_processor": _bos_processor(bos, tokens) if begins and bos is not None else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": _SPLITS[way] is _SPLITS["llama-bpe"],
            "vocab": vocabulary,
            "merges": _merges(model, vocabulary),
        },
    }


def _bos_processor(bos: str, tokens: list[str]) -> dict[str, Any]:
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _strings(model: Gguf, key: str) -> list[str]:
    value = model.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise model.refuse("is missing; use another file of the model", key)
    return value


def _kinds(model: Gguf, count: int) -> list[int]:
    """Return the type of each token; plain text if the file does not say."""
    key = "tokenizer.ggml.token_type"
    kinds = model.metadata.get(key) or [1] * count
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(one, int) for one in kinds):
        raise model.refuse(f"must be a list of {count} numbers, one for each token; fetch it again", key)
    return kinds


def _text(model: Gguf, key: str) -> str | None:
    value = model.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise model.refuse(f"must be a text, not {_shorten(value)}; fetch it again", key)
    return value


def _merges(model: Gguf, vocabulary: Container[str]) -> list[list[str]]:
    """Return the pairs of tokens to merge; all of them and their results must be known tokens."""
    key = "tokenizer.ggml.merges"
    pairs = [merge.split(" ", 1) for merge in _strings(model, key)]
    for pair in pairs:
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise model.refuse(f"{_shorten(' '.join(pair))} does not join two known tokens; use another file", key)
    return pairs


def _find_token(model: Gguf, tokens: list[str], key: str) -> str | None:
    number = model.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    return tokens[number]


def _shorten(value: Any) -> str:
    """Shorten a value from a file for an error message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def write_settings(model: Gguf, folder: Path) -> None:
    """Write those of `build_settings` that the folder lacks. Raises ModelFileError and OSError."""
    if (folder / "tokenizer.json").is_file():
        return
    for name, content in build_settings(model).items():
        if not (folder / name).is_file():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
