"""Read a model's folder into a Contract; sentence-transformers is the reference for every default."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from shoal.errors import ModelFileError
from shoal.models.convert.contract.adapters import ARGUMENTS, TASK, choose_task, name_tasks
from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.classifier import CrossModules, is_cross_encoder, read_classifier, read_cross_modules
from shoal.models.convert.contract.entries import encoder_path, read_entries
from shoal.models.convert.contract.families import read_encoder
from shoal.models.convert.contract.families.jina import with_flash_type
from shoal.models.convert.contract.heads import Heads, kind_of, longest, read_heads, with_markers
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.late import SETTINGS as LATE_SETTINGS
from shoal.models.convert.contract.lengths import Length, read_tokenizer_limit, shortest
from shoal.models.convert.contract.modules import Modules, compute_output_width, read_modules, truncate_modules
from shoal.models.convert.contract.pair_template import check_inputs, read_template
from shoal.models.convert.contract.published_reranker import read_form, read_published_reranker
from shoal.models.convert.contract.saved import SavedSettings, read_saved
from shoal.models.convert.contract.static import read_static
from shoal.models.convert.contract.types import Classifier, Contract, Pooling

SENTENCE_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""In the order in which sentence-transformers looks for them; it uses the first one found."""

GRAPHS = ("onnx/model.onnx", "model.onnx", "onnx/model_fp16.onnx", "model_fp16.onnx")
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
"""Keys of sentence_bert_config.json with the only supported value."""

_SCORING_KEYS = {key: value for key, value in _SENTENCE_KEYS.items() if not key.endswith(("_config", "_kwargs"))} | {
    "transformer_task": "sequence-classification",
    "module_output_name": "scores",
}
"""The same for a cross-encoder; `pair_template` reads the others."""

_SERVED = {
    "dense": _SENTENCE_KEYS,
    "scores": _SCORING_KEYS,
    "answers": _SCORING_KEYS | {"transformer_task": "text-generation", "module_output_name": "causal_logits"},
    "sparse": _SENTENCE_KEYS
    | {
        "transformer_task": "fill-mask",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    },
    "late": {key: value for key, value in _SENTENCE_KEYS.items() if key not in LATE_SETTINGS},
}
"""By kind of model."""

_WITHOUT_EFFECT = frozenset(
    {"torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_fast", "trust_remote_code", "use_cache"}
)
"""Loading arguments that affect speed or precision, never the vectors."""

_POSITIONS = "max_position_embeddings"
_UNSAID = Length(0, "", "")


def read_contract(folder: Path, *, elsewhere: bool = False, foreign: bool = False) -> Contract:
    """Read and check every file that determines the vectors.

    Raises ModelFileError, naming file and key, for missing, malformed, unknown or contradictory content. An unknown
    architecture is accepted only if the folder ships an ONNX graph, or with `foreign`, if something else will run or
    export it (`encoder` is then None). For a model that runs `elsewhere`, any architecture is accepted and unstated
    values stay open: config.json may be missing, and `dimension` and `max_tokens` are then 0.
    """
    if not elsewhere and (form := read_form(folder)):
        return read_published_reranker(folder, form)
    crossing = read_cross_modules(folder) if not elsewhere and is_cross_encoder(folder) else None
    entries = None if crossing else read_entries(folder)
    if not elsewhere and not crossing and (static := read_static(folder, entries)) is not None:
        return static
    path = crossing.encoder if crossing else encoder_path(entries)
    prefix = f"{path}/" if path else ""
    config = _config(folder, prefix, elsewhere)
    encoder = _encoder(folder, config, path, elsewhere or foreign, crossing)
    classifier = None if entries or elsewhere else read_classifier(folder, config, encoder, prefix, crossing)
    kind = "dense" if elsewhere or crossing or classifier else kind_of(folder, entries, config)
    modules = read_modules(folder, entries) if entries and kind == "dense" else None
    form = "answers" if crossing and crossing.answers is not None else "scores" if classifier else kind
    sentence = _sentence_config(folder, prefix, form) if entries or crossing else None
    encoder = choose_task(encoder, sentence) if encoder and sentence else encoder
    if classifier and sentence:
        classifier = _with_template(classifier, folder, prefix, sentence)
    width = 0 if classifier else _width(modules, encoder, config, elsewhere)
    heads = Heads()
    if not classifier and not elsewhere:
        heads = read_heads(folder, kind, entries, config=config, sentence=sentence, width=width)
    saved = SavedSettings()
    if crossing or entries or kind != "dense":
        saved = read_saved(folder, "scores" if crossing else kind)
    pooling = modules.pooling if modules else Pooling()
    after = truncate_modules(modules.after if modules else (), None if elsewhere else saved.dimensions)
    limits = longest(heads.late, _stated_lengths(folder, prefix, sentence)) + _positions(encoder, config)
    length = _max_tokens(limits, config, elsewhere)
    return Contract(
        encoder_path=path,
        encoder=_limited(encoder, length.tokens),
        pooling=pooling,
        modules=after,
        dimension=compute_output_width(width * len(pooling.modes), after) if kind == "dense" else 0,
        max_tokens=length.tokens,
        max_tokens_at=(length.file, length.key),
        pad_id=encoder.pad_id if encoder else config.integer("pad_token_id", 0),
        vocab_size=encoder.vocab_size if encoder else config.integer("vocab_size", 0),
        lower_case=sentence.boolean("do_lower_case", False) if sentence else False,
        prompts=name_tasks(encoder, with_markers(saved.prompts, heads.prompts)),
        default_prompt_name=saved.default_prompt_name,
        similarity=saved.similarity,
        classifier=classifier,
        splade=heads.splade,
        token_weights=heads.token_weights,
        late=heads.late,
    )


def shipped_graph(folder: Path, encoder_path: str = "") -> str | None:
    """Return the path of the ONNX graph that comes with the model, None if it has none."""
    for base in dict.fromkeys((encoder_path, "")):
        for name in GRAPHS:
            path = f"{base}/{name}" if base else name
            if (folder / path).is_file():
                return path
    return None


def _config(folder: Path, prefix: str, elsewhere: bool) -> JsonFile:
    name = f"{prefix}config.json"
    config = read_object(folder, name)
    if config is None and not elsewhere:
        raise ModelFileError("is missing; this is not a transformers model, or it is incomplete", file=name)
    return with_flash_type(config) if config is not None else JsonFile(name, {})


def _encoder(folder: Path, config: JsonFile, path: str, foreign: bool, crossing: CrossModules | None) -> Encoder | None:
    answering = crossing is not None and crossing.answers is not None
    try:
        return read_encoder(config)
    except ModelFileError:
        if answering or (not foreign and shipped_graph(folder, path) is None):
            raise
        return None


def _limited(encoder: Encoder | None, tokens: int) -> Encoder | None:
    """Return the encoder with no more positions than the model is read with, unless they are rows of a stored table.
    Language models state far more positions than their embeddings use."""
    if encoder is None or encoder.embeddings.positions:
        return encoder
    return replace(encoder, max_positions=min(encoder.max_positions, tokens))


def _with_template(classifier: Classifier, folder: Path, prefix: str, sentence: JsonFile) -> Classifier:
    check_inputs(sentence)
    if classifier.answers is not None and "modality_config" not in sentence:
        raise sentence.refuse("modality_config", "is missing: it says how the model reads a pair")
    template = read_template(folder, prefix, sentence)
    return replace(classifier, spec=replace(classifier.spec, template=template))


def _width(modules: Modules | None, encoder: Encoder | None, config: JsonFile, elsewhere: bool) -> int:
    if modules is None or modules.width is None:
        if elsewhere and "hidden_size" not in config:
            return encoder.hidden if encoder else 0
        return encoder.hidden if encoder else config.integer("hidden_size", least=1)
    if encoder is not None and modules.width != encoder.hidden:
        file, _, key = modules.pooling_file.partition(": ")
        raise ModelFileError(f"{modules.width} is not the encoder's {encoder.hidden}", file=file, key=key)
    return modules.width


def _sentence_config(folder: Path, prefix: str, kind: str) -> JsonFile | None:
    config = next((found for name in SENTENCE_CONFIGS if (found := read_object(folder, prefix + name))), None)
    if config is None:
        return None
    served = _SERVED[kind]
    for key, value in config.data.items():
        if key in served and value is not None and value != served[key]:
            raise config.refuse(key, f"{value!r} is not supported")
    config.only(
        frozenset(_SENTENCE_KEYS)
        | {"max_seq_length", "do_lower_case", "unpad_inputs", "tokenizer_name_or_path"}
        | {"model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"}
    )
    if "tokenizer_name_or_path" in config:
        raise config.refuse("tokenizer_name_or_path", "a tokenizer from another model is not supported")
    for group in ARGUMENTS:
        _without_effect(config, group, _WITHOUT_EFFECT | {TASK})  # see choose_task
    for group in ("config_args", "config_kwargs"):
        _without_effect(config, group, _WITHOUT_EFFECT)
    for group in ("tokenizer_args", "processor_kwargs"):
        _without_effect(config, group, _WITHOUT_EFFECT | {"model_max_length"})
    return config


def _without_effect(config: JsonFile, group: str, known: frozenset[str]) -> None:
    for key in config.object(group):
        if key not in known:
            raise config.refuse(f"{group}.{key}", "is not supported; it may change the vectors")


def _max_tokens(limits: list[Length], config: JsonFile, elsewhere: bool) -> Length:
    if not limits and not elsewhere:
        raise config.refuse(_POSITIONS, "neither this nor max_seq_length sets the maximum input length")
    return shortest(limits) if limits else _UNSAID


def _positions(encoder: Encoder | None, config: JsonFile) -> list[Length]:
    """Return the limit of the position table, if known."""
    if encoder is not None:
        return [Length(encoder.usable_positions, config.name, _POSITIONS)]
    return [_read_length(config, _POSITIONS)] if _POSITIONS in config else []


def _stated_lengths(folder: Path, prefix: str, sentence: JsonFile | None) -> list[Length]:
    if sentence is not None:
        arguments = sentence.object("tokenizer_args") or sentence.object("processor_kwargs")
        if "model_max_length" in arguments:
            return [_read_length(JsonFile(sentence.name, arguments), "model_max_length")]
        if "max_seq_length" in sentence:
            return [_read_length(sentence, "max_seq_length")]
    tokenizer = read_object(folder, f"{prefix}tokenizer_config.json")
    limit = read_tokenizer_limit(tokenizer) if tokenizer is not None else None
    return [limit] if limit is not None else []


def _read_length(config: JsonFile, key: str) -> Length:
    return Length(config.integer(key, least=1), config.name, key)
