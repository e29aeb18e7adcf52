"""One reading of a model's folder into a Contract; sentence-transformers is the reference for every default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.errors import ModelFileError
from shoal.models.contract.encoder import read_encoder
from shoal.models.contract.json_file import JsonFile, read_object
from shoal.models.contract.modules import Modules, read_modules
from shoal.models.contract.types import AfterPooling, Contract, Dense, Encoder, LayerNorm, Normalize, Pooling

SENTENCE_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""In the order in which sentence-transformers looks for them; the first one that is there counts."""

GRAPHS = ("onnx/model.onnx", "model.onnx")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_TEXT_MODALITY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_SENTENCE_KEYS = {
    "transformer_task": "feature-extraction",
    "modality_config": _TEXT_MODALITY,
    "module_output_name": "token_embeddings",
    "processing_kwargs": {},
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
}
"""Keys of sentence_bert_config.json with the only value that Shoal serves."""

_WITHOUT_EFFECT = frozenset(
    {"torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_fast", "trust_remote_code", "use_cache"}
)
"""Loading arguments that choose speed or precision, never other vectors."""

_ENDLESS = 10**9
"""transformers writes 1e30 for "no limit"; no tokenizer states a true limit near this."""


def read_contract(folder: Path, *, elsewhere: bool = False) -> Contract:
    """Read and check every file that decides on the vectors.

    Raises ModelFileError, naming file and key, for what is missing, malformed, unknown or contradictory. An
    unknown architecture is accepted only when the folder ships an ONNX graph (`encoder` is then None).
    Of a model that runs `elsewhere` any architecture is, and what no file says is left open: config.json may be
    missing, `dimension` and `max_tokens` are 0 then.
    """
    modules = read_modules(folder)
    path = modules.encoder_path if modules else ""
    prefix = f"{path}/" if path else ""
    config = read_object(folder, f"{prefix}config.json")
    if config is None and elsewhere:
        config = JsonFile(f"{prefix}config.json", {})
    if config is None:
        raise ModelFileError(
            "is missing; this is no transformers model, or it is incomplete", file=f"{prefix}config.json"
        )
    encoder = _encoder(folder, config, path, elsewhere)
    sentence = _sentence_config(folder, prefix) if modules else None
    after = modules.after if modules else ()
    pooling = modules.pooling if modules else Pooling()
    width = _width(modules, encoder, config, elsewhere)
    prompts, default, similarity = _prompts(folder) if modules else ({}, None, "cosine")
    return Contract(
        encoder_path=path,
        encoder=encoder,
        pooling=pooling,
        modules=after,
        dimension=_dimension(width * len(pooling.modes), after),
        max_tokens=_max_tokens(_limits(folder, prefix, sentence, encoder, config), config, elsewhere),
        pad_id=encoder.pad_id if encoder else config.integer("pad_token_id", 0),
        vocab_size=encoder.vocab_size if encoder else config.integer("vocab_size", 0),
        lower_case=sentence.boolean("do_lower_case", False) if sentence else False,
        prompts=prompts,
        default_prompt_name=default,
        similarity=similarity,
    )


def shipped_graph(folder: Path, encoder_path: str = "") -> str | None:
    """The path of the ONNX graph that comes with the model, None when it has none."""
    for base in dict.fromkeys((encoder_path, "")):
        for name in GRAPHS:
            path = f"{base}/{name}" if base else name
            if (folder / path).is_file():
                return path
    return None


def _encoder(folder: Path, config: JsonFile, path: str, elsewhere: bool) -> Encoder | None:
    try:
        return read_encoder(config)
    except ModelFileError:
        if not elsewhere and shipped_graph(folder, path) is None:
            raise
        return None


def _width(modules: Modules | None, encoder: Encoder | None, config: JsonFile, elsewhere: bool) -> int:
    if modules is None or modules.width is None:
        if elsewhere and "hidden_size" not in config:
            return encoder.hidden if encoder else 0
        return encoder.hidden if encoder else config.integer("hidden_size", least=1)
    if encoder is not None and modules.width != encoder.hidden:
        file, _, key = modules.pooling_file.partition(": ")
        raise ModelFileError(f"{modules.width} is not the encoder's {encoder.hidden}", file=file, key=key)
    return modules.width


def _dimension(width: int, after: tuple[AfterPooling, ...]) -> int:
    for module in after:
        if isinstance(module, Normalize):
            continue
        takes, key = (
            (module.in_features, "in_features") if isinstance(module, Dense) else (module.dimension, "dimension")
        )
        if width and takes != width:
            raise ModelFileError(
                f"takes {takes} dimensions, but {width} come in", file=f"{module.path}/config.json", key=key
            )
        width = module.dimension if isinstance(module, LayerNorm) else module.out_features
    return width


def _sentence_config(folder: Path, prefix: str) -> JsonFile | None:
    config = next((found for name in SENTENCE_CONFIGS if (found := read_object(folder, prefix + name))), None)
    if config is None:
        return None
    for key, value in config.data.items():
        if key in _SENTENCE_KEYS and value is not None and value != _SENTENCE_KEYS[key]:
            raise config.refuse(key, f"{value!r} is not supported")
    config.only(
        frozenset(_SENTENCE_KEYS)
        | {"max_seq_length", "do_lower_case", "unpad_inputs", "tokenizer_name_or_path"}
        | {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
    )
    if "tokenizer_name_or_path" in config:
        raise config.refuse("tokenizer_name_or_path", "a tokenizer from another model is not supported")
    for group in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        _without_effect(config, group, _WITHOUT_EFFECT)
    for group in ("tokenizer_args", "processor_kwargs"):
        _without_effect(config, group, _WITHOUT_EFFECT | {"model_max_length"})
    return config


def _without_effect(config: JsonFile, group: str, known: frozenset[str]) -> None:
    for key in config.object(group):
        if key not in known:
            raise config.refuse(f"{group}.{key}", "is not supported; it may change the vectors")


def _max_tokens(limits: list[int], config: JsonFile, elsewhere: bool) -> int:
    if not limits and not elsewhere:
        raise config.refuse("max_position_embeddings", "neither this nor a max_seq_length says how long inputs may be")
    return min(limits, default=0)


def _limits(
    folder: Path, prefix: str, sentence: JsonFile | None, encoder: Encoder | None, config: JsonFile
) -> list[int]:
    limits = _stated_lengths(folder, prefix, sentence)
    if encoder is not None:
        limits.append(encoder.usable_positions)
    elif "max_position_embeddings" in config:
        limits.append(config.integer("max_position_embeddings", least=1))
    return limits


def _stated_lengths(folder: Path, prefix: str, sentence: JsonFile | None) -> list[int]:
    if sentence is not None:
        arguments = sentence.object("tokenizer_args") or sentence.object("processor_kwargs")
        if "model_max_length" in arguments:
            return [JsonFile(sentence.name, arguments).integer("model_max_length", least=1)]
        if "max_seq_length" in sentence:
            return [sentence.integer("max_seq_length", least=1)]
    tokenizer = read_object(folder, f"{prefix}tokenizer_config.json")
    if tokenizer is None or "model_max_length" not in tokenizer:
        return []
    stated = tokenizer.number("model_max_length")
    return [int(stated)] if stated < _ENDLESS else []


def _prompts(folder: Path) -> tuple[dict[str, str], str | None, str]:
    config = read_object(folder, "config_sentence_transformers.json")
    if config is None:
        return {}, None, "cosine"
    model_type = config.text("model_type", "SentenceTransformer")
    if model_type != "SentenceTransformer":
        raise config.refuse("model_type", f"{model_type!r} is not a dense text embedding model")
    prompts = {name: text for name, text in config.object("prompts").items() if text is not None}
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise config.refuse(f"prompts.{name}", f"must be a string, not {text!r}")
    default: Any = config.data.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise config.refuse("default_prompt_name", f"{default!r} is not among the prompts ({', '.join(prompts)})")
    similarity = config.text("similarity_fn_name", "cosine")
    if similarity not in SIMILARITIES:
        raise config.refuse("similarity_fn_name", f"{similarity!r} is none of {', '.join(SIMILARITIES)}")
    return prompts, default, similarity
