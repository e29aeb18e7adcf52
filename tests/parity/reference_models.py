"""Tiny random models, written by transformers and sentence-transformers themselves, one per feature under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HIDDEN, POSITIONS, LONGEST = 32, 80, 48
TALE = "fish swim together where can i renew my passport how long does it take harbour water tells fewer lies"
WORDS = TALE.split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!'"
LEGACY_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Case:
    """`after`: (module, arguments) after the pooling; `finish` edits the saved folder."""

    name: str
    family: str = "bert"
    pooling: str | tuple[str, ...] = "mean"
    include_prompt: bool = True
    after: tuple[tuple[str, tuple[Any, ...]], ...] = (("Normalize", ()),)
    config: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    lower_case: bool = False
    finish: Callable[[Path], None] = lambda folder: None


def write(case: Case, folder: Path) -> Path:
    """Save the case's model as sentence-transformers does; return the folder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(7)
    encoder = folder / "encoder"
    model = _encoder(case)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh norms and biases are ones and zeros, which would prove nothing
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(encoder)
    _tokenizer(case.family).save_pretrained(encoder)
    parts: list[Any] = [
        modules.Transformer(str(encoder), max_seq_length=LONGEST, do_lower_case=case.lower_case),
        modules.Pooling(HIDDEN, pooling_mode=case.pooling, include_prompt=case.include_prompt),
    ]
    for name, arguments in case.after:
        parts.append(_module(modules, name, arguments))
    saved = folder / "model"
    SentenceTransformer(modules=parts, prompts=case.prompts or None).save(str(saved), create_model_card=False)
    if case.lower_case:  # version 6 stores the length in the tokenizer's files and drops the rest of this one
        (saved / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST, "do_lower_case": True}))
    case.finish(saved)
    return saved


@dataclass(frozen=True)
class CrossCase:
    """A classifier or cross-encoder. `saved` by transformers, or by sentence-transformers with `activation` (a class of
    torch.nn; None: its default)."""

    name: str
    family: str = "bert"
    labels: int = 1
    saved: Literal["transformers", "sentence-transformers"] = "sentence-transformers"
    activation: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    finish: Callable[[Path], None] = lambda folder: None


def write_cross(case: CrossCase, folder: Path) -> Path:
    """Save the case's model as its library does; return the folder."""
    import torch
    import transformers
    from sentence_transformers import CrossEncoder

    torch.manual_seed(11)
    config = _config(case.family, case.config | {"num_labels": case.labels})
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    plain, saved = folder / "plain", folder / "model"
    tokenizer = _tokenizer(case.family)
    tokenizer.model_max_length = LONGEST
    for place in (plain, saved):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    if case.saved == "sentence-transformers":
        activation = getattr(torch.nn, case.activation)() if case.activation else None
        prompts = {"prompts": case.prompts, "default_prompt_name": next(iter(case.prompts))} if case.prompts else {}
        cross = CrossEncoder(str(plain), device="cpu", activation_fn=activation, **prompts)
        cross.save(str(saved), create_model_card=False)
    case.finish(saved)
    return saved


def _module(modules: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    import torch

    if name == "Dense":
        into, out, activation, bias = arguments
        return modules.Dense(into, out, bias=bias, activation_function=getattr(torch.nn, activation)())
    module = getattr(modules, name)(*arguments)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def _encoder(case: Case) -> Any:
    import transformers

    return transformers.AutoModel.from_config(_config(case.family, case.config))


def _config(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    size = len(_tokenizer(family))
    if family == "distilbert":
        config = {"vocab_size": size, "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    else:
        config = {
            "vocab_size": size,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        }
    config |= {"max_position_embeddings": POSITIONS, "initializer_range": 0.3} | changes
    if family in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        config.setdefault("pad_token_id", 1)
    if family == "electra":
        config.setdefault("embedding_size", HIDDEN)
    return transformers.AutoConfig.for_model(family, **config)


def _tokenizer(family: str) -> Any:
    import transformers

    if family in ("bert", "distilbert", "electra"):
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        return transformers.BertTokenizer(vocab=_ids([*special, *_pieces("##")]))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if family == "mpnet":
        return transformers.MPNetTokenizer(vocab=_ids([*special[:3], "[UNK]", *special[3:], *_pieces("##")]))
    if family == "roberta":
        alphabet = [*LETTERS, *LETTERS.upper(), *"ĠĊâĢĻÃ©äº¬æĿ±¡"]
        merges = [("f", "i"), ("s", "h"), ("fi", "sh"), ("Ġ", "fish"), ("t", "o"), ("Ġ", "to"), ("Ġ", "w")]
        vocab = _ids([*special, *alphabet, *("".join(pair) for pair in merges)])
        return transformers.RobertaTokenizer(vocab=vocab, merges=merges)
    pieces = [(f"▁{word}", -2.0) for word in WORDS] + [(letter, -6.0) for letter in ("▁", *LETTERS)]
    kind = transformers.XLMRobertaTokenizer if family == "xlm-roberta" else transformers.CamembertTokenizer
    return kind(vocab=[(token, 0.0) for token in special] + pieces)


def _pieces(mark: str) -> list[str]:
    return [*WORDS, *LETTERS, *LETTERS.upper(), *(mark + letter for letter in LETTERS), f"{mark}ing", "é", "東", "京"]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def without_modules(folder: Path) -> None:
    """A plain transformers checkpoint: mean pooling by default."""
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()


def legacy(folder: Path) -> None:
    """Files in the form of sentence-transformers 2: class paths, pooling flags, a length of their own."""
    listed = json.loads((folder / "modules.json").read_text())
    for module in listed:
        module["type"] = "sentence_transformers.models." + module["type"].rpartition(".")[2]
    (folder / "modules.json").write_text(json.dumps(listed))
    place = folder / "1_Pooling" / "config.json"
    config = json.loads(place.read_text())
    modes = config["pooling_mode"]
    modes = [modes] if isinstance(modes, str) else modes
    flags = {flag: mode in modes for mode, flag in LEGACY_FLAGS.items()}
    place.write_text(json.dumps({"word_embedding_dimension": config["embedding_dimension"], **flags}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": False}))


def halved(folder: Path) -> None:
    """Weights in float16."""
    _rewrite(folder, "float16")


def brain_halved(folder: Path) -> None:
    """Weights in bfloat16."""
    _rewrite(folder, "bfloat16")


def sharded(folder: Path) -> None:
    """Weights in several files with an index."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()


def with_a_head(folder: Path) -> None:
    """Saved from a masked language model: every name has the family's prefix, and there are weights besides the
    encoder's."""
    import transformers

    transformers.AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(folder)


def vocabulary_only(folder: Path) -> None:
    """Without tokenizer.json: only the files that it is built from."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    (folder / "tokenizer.json").unlink()
    if data["model"]["type"] == "WordPiece":
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        return
    (folder / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")


def cased(folder: Path) -> None:
    """tokenizer_config.json says cased, tokenizer.json still lower-cases: transformers uses the former."""
    place = folder / "tokenizer_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"do_lower_case": False}))


def of_version_4(folder: Path) -> None:
    """A cross-encoder as saved by sentence-transformers 4: its activation in config.json, no other file."""
    _into_config(folder, {"sentence_transformers": {"activation_fn": _forget(folder), "version": "4.1.0"}})


def of_version_3(folder: Path) -> None:
    """The same as saved before version 4."""
    _into_config(folder, {"sbert_ce_default_activation_function": _forget(folder)})


def _forget(folder: Path) -> str:
    activation = json.loads((folder / "config_sentence_transformers.json").read_text())["activation_fn"]
    without_modules(folder)
    return str(activation)


def _into_config(folder: Path, keys: dict[str, Any]) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | keys))


def without_segments(folder: Path) -> None:
    """The tokenizer declares no token types, although the model could read them."""
    place = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    place.write_text(json.dumps(json.loads(place.read_text()) | names))


def _rewrite(folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kind = getattr(torch, dtype)
    save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, folder / "model.safetensors")


CASES = (
    Case("bert-mean"),
    Case("bert-legacy-files", finish=legacy),
    Case("bert-legacy-two-modes", pooling=("cls", "mean"), after=(), finish=legacy),
    Case("bert-cls-gelu-new", pooling="cls", config={"hidden_act": "gelu_new"}),
    Case("bert-max-relu", pooling="max", after=(), config={"hidden_act": "relu"}),
    Case("bert-weighted-mean", pooling="weightedmean"),
    Case("bert-last-token", pooling="lasttoken"),
    Case("bert-mean-sqrt", pooling="mean_sqrt_len_tokens", after=()),
    Case("bert-two-modes", pooling=("mean", "cls"), after=(("Dense", (2 * HIDDEN, 12, "Tanh", True)),)),
    Case("bert-two-dense", after=(("Dense", (HIDDEN, 40, "Identity", False)), ("Dense", (40, 12, "GELU", True)))),
    Case("bert-layer-norm", after=(("LayerNorm", (HIDDEN,)), ("Normalize", ()))),
    Case("bert-dropout", after=(("Dropout", (0.5,)), ("Normalize", ()))),
    Case("bert-lower-case", lower_case=True, finish=cased),
    Case("roberta-lower-case", "roberta", lower_case=True),
    Case("bert-cased", finish=cased),
    Case("bert-no-modules", finish=without_modules),
    Case("bert-float16", finish=halved),
    Case("bert-bfloat16", finish=brain_halved),
    Case("bert-sharded", finish=sharded),
    Case("bert-with-a-head", finish=with_a_head),
    Case("bert-vocabulary-only", finish=vocabulary_only),
    Case("bert-prompts", prompts={"query": "where can i: ", "document": "harbour "}),
    *(
        Case(f"{family}-prompt-left-out", family, pooling=mode, include_prompt=False, prompts={"query": "renew my: "})
        for family, mode in (
            ("bert", "mean"),
            ("roberta", "cls"),
            ("mpnet", "weightedmean"),
            ("distilbert", "max"),
            ("xlm-roberta", ("lasttoken", "mean_sqrt_len_tokens")),
        )
    ),
    Case("roberta-mean", "roberta"),
    Case("roberta-cls-dense", "roberta", pooling="cls", after=(("Dense", (HIDDEN, 20, "Sigmoid", True)),)),
    Case("roberta-vocabulary-only", "roberta", finish=vocabulary_only),
    Case("roberta-with-a-head", "roberta", finish=with_a_head),
    Case("xlm-roberta-mean", "xlm-roberta"),
    Case("camembert-mean", "camembert"),
    Case("mpnet-mean", "mpnet"),
    Case("mpnet-with-a-head", "mpnet", finish=with_a_head),
    Case("distilbert-mean", "distilbert"),
    Case("distilbert-relu", "distilbert", config={"activation": "relu"}, pooling="cls"),
    Case("distilbert-with-a-head", "distilbert", finish=with_a_head),
)

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra")
CROSS_CASES = (
    *(CrossCase(f"{family}-1", family) for family in FAMILIES),
    *(CrossCase(f"{family}-3", family, labels=3) for family in FAMILIES),
    CrossCase("bert-1-identity", activation="Identity"),
    CrossCase("roberta-3-sigmoid", "roberta", labels=3, activation="Sigmoid"),
    CrossCase("bert-1-version-4", activation="Identity", finish=of_version_4),
    CrossCase("xlm-roberta-3-version-3", "xlm-roberta", labels=3, activation="Sigmoid", finish=of_version_3),
    CrossCase("bert-1-plain", saved="transformers"),
    CrossCase("bert-1-without-segments", finish=without_segments),
    CrossCase("bert-1-default-prompt", prompts={"query": "where can i: "}),
    CrossCase("bert-1-float16", finish=halved),
    CrossCase("bert-1-vocabulary-only", finish=vocabulary_only),
    CrossCase("roberta-1-vocabulary-only", "roberta", finish=vocabulary_only),
)
"""Cases with sentence-transformers' CrossEncoder as the reference."""

CLASSIFIERS = (
    *(CrossCase(f"{family}-3", family, labels=3, saved="transformers") for family in FAMILIES),
    CrossCase("bert-1", saved="transformers"),
    CrossCase("bert-2", labels=2, saved="transformers"),
    CrossCase("bert-3-multi", labels=3, saved="transformers", config={"problem_type": "multi_label_classification"}),
    CrossCase("bert-3-regression", labels=3, saved="transformers", config={"problem_type": "regression"}),
)
"""Cases with transformers' text-classification pipeline as the reference."""
