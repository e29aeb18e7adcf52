"""Read sequence classifiers and cross-encoders: labels, activation and head, as their files say.

Two libraries save them. Files that name sentence-transformers as their library are those of a cross-encoder; any other
`...ForSequenceClassification` is a transformers classifier.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ModelFileError
from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.classifier_heads import read_answers, read_head, reads_segments
from shoal.models.convert.contract.dense import find_torch_activation
from shoal.models.convert.contract.entries import MODULES, inner_path
from shoal.models.convert.contract.json_file import JsonFile, read_json, read_object
from shoal.models.convert.contract.types import Classifier
from shoal.specs import Activation as ScoreActivation
from shoal.specs import ScoreSpec

SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"
ARCHITECTURE = "ForSequenceClassification"
LANGUAGE_MODEL = "ForCausalLM"
_ACTIVATIONS: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
_PROBLEMS: dict[str, ScoreActivation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
_MOST_LABELS = 100_000


def is_cross_encoder(folder: Path) -> bool:
    """Whether sentence-transformers saved the folder as a cross-encoder (since version 5.4; older ones look like a
    transformers classifier with one more key)."""
    config = read_object(folder, SENTENCE_TRANSFORMERS)
    return config is not None and config.data.get("model_type") == "CrossEncoder"


class CrossModules(NamedTuple):
    """The folders of a cross-encoder's modules. `answers`: of the one that scores by a language model's answers."""

    encoder: str = ""
    answers: str | None = None


def read_cross_modules(folder: Path) -> CrossModules:
    """Read modules.json of a saved cross-encoder. Raises ModelFileError for modules that are not supported."""
    listed = read_json(folder, MODULES)
    if listed is None:
        return CrossModules()
    modules = listed if isinstance(listed, list) else []
    if not modules:
        raise ModelFileError("must list one Transformer with its path", file=MODULES)
    paths = []
    for index, module in enumerate(modules):
        kind, path = (module.get("type"), module.get("path", "")) if isinstance(module, dict) else (None, None)
        if not _is_module(kind, ("Transformer", "LogitScore")[index : index + 1]):
            raise ModelFileError(
                f"{kind!r} is not supported in a cross-encoder, which must be a Transformer, or that and a LogitScore",
                file=MODULES,
                key=f"[{index}].type",
            )
        if not isinstance(path, str):
            raise ModelFileError("must be the path of the module", file=MODULES, key=f"[{index}].path")
        paths.append(inner_path(path, index))
    return CrossModules(*paths)


def _is_module(kind: object, names: tuple[str, ...]) -> bool:
    return isinstance(kind, str) and kind.startswith("sentence_transformers.") and kind.rpartition(".")[2] in names


def read_classifier(
    folder: Path, config: JsonFile, encoder: Encoder | None, prefix: str, modules: CrossModules | None = None
) -> Classifier | None:
    """Read the head from the files; None for a model that is neither classifier nor cross-encoder.

    `config` is config.json, `prefix` the path before the names of the files beside it, `modules` those of a saved
    cross-encoder. Raises ModelFileError naming the key for labels and activations that cannot be served.
    """
    saved = read_object(folder, SENTENCE_TRANSFORMERS) if modules else None
    architectures = config.texts("architectures") or [""]
    answering = modules is not None and modules.answers is not None
    ending = LANGUAGE_MODEL if answering else ARCHITECTURE
    scores = architectures[0].endswith(ending)
    if saved is None and not scores:
        return None
    if not scores:
        raise config.refuse("architectures", f"{architectures[0]!r} is not ...{ending}, so it has no scores")
    labels = ("LABEL_0",) if answering else read_labels(config)
    spec = ScoreSpec(
        labels=labels,
        activation=read_activation(config, saved, len(labels)),
        pairs=saved is not None or _is_old_cross_encoder(config) or len(labels) == 1,
    )
    if modules is not None and modules.answers is not None:
        return read_answers(folder, modules.answers, config, spec)
    if encoder is None:
        return Classifier(spec=spec)
    return read_head(config, spec, segments=reads_segments(encoder) and tells_segments(folder, prefix))


def read_labels(config: JsonFile) -> tuple[str, ...]:
    """Return `id2label` in numeric order; without it LABEL_0, LABEL_1 and so on, `num_labels` of them, or 2 as in
    transformers. Raises ModelFileError for too many labels, and for labels that are not valid names or not unique."""
    if "id2label" not in config:
        count = config.integer("num_labels", 2, least=1, most=_MOST_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    labels = config.object("id2label")
    if len(labels) > _MOST_LABELS:
        raise config.refuse("id2label", f"must name at most {_MOST_LABELS} labels, not {len(labels)}")
    indices = [str(index) for index in range(len(labels))]
    if not labels or any(index not in labels for index in indices):
        raise config.refuse("id2label", "must name the labels 0, 1, 2, ... without a gap")
    for name in map(labels.get, indices):
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise config.refuse("id2label", f"must name labels by strings, not {name!r}")
    names = tuple(str(labels[index]) for index in indices)
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise config.refuse("id2label", f"names the label {twice!r} twice, so their scores cannot be told apart")
    return names


def read_activation(config: JsonFile, saved: JsonFile | None, labels: int) -> ScoreActivation:
    """Return the activation that turns logits into scores, unless raw scores are requested.

    1. An activation stored by sentence-transformers, with a name that starts with `torch.` (others are the model's own
       code, which that library ignores too): `activation_fn` of config_sentence_transformers.json (`saved`), of
       config.json's `sentence_transformers`, or the older `sbert_ce_default_activation_function`.
    2. One label: sigmoid. sentence-transformers and Text Embeddings Inference do so, whatever the problem_type, and a
       sigmoid changes no order.
    3. A cross-encoder of sentence-transformers with several labels: identity, that library's rule.
    4. A transformers classifier with several labels: by its problem_type, as that library's text-classification
       pipeline does: softmax, also if none is given; sigmoid for multi_label_classification; identity for regression.
    """
    named = _find_activation(config, saved)
    if named is not None:
        return named
    if labels == 1:
        return "sigmoid"
    if saved is not None or _is_old_cross_encoder(config):
        return "identity"
    problem = config.text("problem_type", "single_label_classification")
    if problem not in _PROBLEMS:
        raise config.refuse("problem_type", f"unknown {problem!r}; Shoal knows {', '.join(_PROBLEMS)}")
    return _PROBLEMS[problem]


def _find_activation(config: JsonFile, saved: JsonFile | None) -> ScoreActivation | None:
    own = JsonFile(f"{config.name}: sentence_transformers", config.object("sentence_transformers"))
    places = [(own, "activation_fn"), (config, "sbert_ce_default_activation_function")]
    if saved is not None:
        places.insert(0, (saved, "activation_fn"))
    for file, key in places:
        if key not in file:
            continue
        name = file.text(key)
        if not name.startswith("torch."):
            return None
        return find_torch_activation(file, key, name, _ACTIVATIONS)
    return None


def _is_old_cross_encoder(config: JsonFile) -> bool:
    """Whether config.json has the key, possibly null, that cross-encoders had before they got a file of their own."""
    return bool({"sentence_transformers", "sbert_ce_default_activation_function"} & set(config.data))


def tells_segments(folder: Path, prefix: str) -> bool:
    """Whether the tokenizer passes token_type_ids to the model. transformers' BERT and DeBERTa tokenizers do unless
    configured not to; those of the RoBERTa kind do not, nor since version 5 those of ALBERT and of no kind."""
    config = read_object(folder, f"{prefix}tokenizer_config.json")
    if config is None:
        return True
    if "model_input_names" in config:
        return "token_type_ids" in config.texts("model_input_names")
    return not any(kind in config.text("tokenizer_class", "") for kind in ("Roberta", "Albert", "TokenizersBackend"))
