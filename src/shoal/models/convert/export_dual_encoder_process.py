"""The process that exports towers: `python -m shoal.models.convert.export_dual_encoder_process FOLDER INTO LIBRARY`.

It writes lines as `export_process` does. See `export_towers` for its result.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.transforms import open_clip_image_spec, timm_image_spec
from shoal.models.convert.export_dual_encoder import TIMM_CONFIG, ExportedTowers
from shoal.models.convert.export_process import (
    INLINE_BYTES,
    MAX_DIFFERENCE,
    MIN_COSINE,
    OPSET,
    Tell,
    open_engine,
    report,
)
from shoal.models.convert.samples import TEXTS
from shoal.models.convert.verify import min_cosine
from shoal.models.manifest import Verdict
from shoal.models.open_clip_tokenizer import byte_pairs, check_options, with_cleaning, without_end
from shoal.models.sources.select import OPEN_CLIP
from shoal.specs import ContrastSpec, ImageSpec, TextSpec
from shoal.types import Array

GRAPH, IMAGE_GRAPH, TOKENIZER = "model.onnx", "image.onnx", "tokenizer.json"
WEIGHTS = "open_clip_model.safetensors"
IDS = "input_ids"
TEXT_EMBEDS = "text_embeds"
_BATCHES = (1, 3)
"""Batch sizes to compare; the graphs were traced with another one."""

_MAX_LOGARITHM = 100.0
_OF_LOADING = ("checkpoint_path", "cache_dir", "features_only", "out_indices", "scriptable", "exportable")


def main() -> None:
    folder, into, library = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    work = {"open_clip": from_open_clip, "timm": from_timm}[library]
    report(lambda tell: work(folder, into, tell), "use another model, or one in transformers' format")


class Part(NamedTuple):
    """A graph to export: `module` takes the one input and returns the `output`."""

    module: Any
    input: str
    output: str
    file: str


def from_open_clip(folder: Path, into: Path, tell: Tell) -> ExportedTowers:
    tell("read", 0.0)
    config = read_object(folder, OPEN_CLIP)
    if config is None:
        raise ModelFileError("is missing; fetch the model again", file=OPEN_CLIP)
    stated = config.section("model_cfg")
    options = stated.section("text_cfg")
    _refuse_open_clip(stated, options)
    clean = check_options(options.section("tokenizer_kwargs"))
    tell("read", 1.0)
    import open_clip

    name = f"local-dir:{folder}"
    # Keep the text tower separate: by default, CLIP stores it in pieces.
    model = open_clip.create_model(name, require_pretrained=True, force_custom_text=True).float().eval()
    theirs = open_clip.get_tokenizer(name)
    tokenizer = _tokenizer(theirs, clean)
    tokenizer.save(str(into / TOKENIZER))
    tell("load", 1.0)
    rows, padded = _samples(theirs, tokenizer)
    text, text_files, text_verdict = _text_tower(model.text, _pad(theirs), rows, padded, into)
    tell("export", 0.5)
    image = open_clip_image_spec(model.visual.preprocess_cfg, dimension=text.dimension, file=OPEN_CLIP)
    files, verdict = _image_tower(model.visual, image, into)
    tell("export", 1.0)
    return ExportedTowers(
        library="open_clip",
        graph=GRAPH,
        text=text,
        text_verification=text_verdict,
        image_graph=IMAGE_GRAPH,
        image=image,
        image_verification=verdict,
        contrast=_contrast(model),
        parameters=_size(model.text) + _size(model.visual),
        files=(*text_files, *files, TOKENIZER),
    )


def from_timm(folder: Path, into: Path, tell: Tell) -> ExportedTowers:
    tell("read", 0.0)
    config = read_object(folder, TIMM_CONFIG)
    if config is None:
        raise ModelFileError("is missing; fetch the model again", file=TIMM_CONFIG)
    _refuse_timm(config)
    tell("read", 1.0)
    import timm
    import torch

    # timm's own loader finds the weights in the folder, and converts those of older layouts.
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).float().eval()
    tell("load", 1.0)
    stated = timm.data.resolve_model_data_config(model)
    labels = _labels(model)
    image = timm_image_spec(stated, dimension=max(1, int(model.num_features)), labels=labels, file=TIMM_CONFIG)
    with torch.inference_mode():
        answer = model(torch.from_numpy(_noise(1, image.size)))
    if not isinstance(answer, torch.Tensor) or answer.ndim != 2 or (labels and answer.shape[1] != len(labels)):
        raise ModelFileError(
            "the model returns neither one vector nor one score per label for an image",
            file=TIMM_CONFIG,
            key="model_args",
        )
    if not labels:
        image = timm_image_spec(stated, dimension=int(answer.shape[1]), labels=(), file=TIMM_CONFIG)
    tell("export", 0.0)
    files, verdict = _image_tower(model, image, into)
    tell("export", 1.0)
    return ExportedTowers(
        library="timm",
        image_graph=IMAGE_GRAPH,
        image=image,
        image_verification=verdict,
        parameters=_size(model),
        files=tuple(files),
    )


def _text_tower(
    tower: Any, pad: int, rows: Sequence[Array], padded: Array, into: Path
) -> tuple[TextSpec, list[str], Verdict | None]:
    """Export the tower, and verify it on texts given as `rows` of ids and `padded` to the model's context."""
    length = int(padded.shape[1])
    free = _is_free(tower)
    part = Part(_any_length(tower) if free else tower, IDS, TEXT_EMBEDS, GRAPH)
    # A length that equals no other dimension of the model.
    files = _export(part, padded[:2, : max(2, length // 2 - 1)] if free else padded[:2], into, free=free)
    right = _run_module(tower, padded)
    alone = rows if free else list(padded)
    compared = [(row[None], right[place : place + 1]) for place, row in enumerate(alone)]
    verdict = _verify(part, [*compared, (padded, right)], into)
    spec = TextSpec(
        tokenizer=TOKENIZER,
        inputs=(IDS,),
        dimension=int(right.shape[1]),
        max_tokens=length,
        pad_id=pad,
        vocab_size=int(tower.vocab_size),
        pooling="eos" if free else "last",
        sentence_embedding=TEXT_EMBEDS,
        pooled=TEXT_EMBEDS,
        ends_normalized=False,
        pad_to=0 if free else length,
    )
    return spec, files, verdict


def _image_tower(module: Any, spec: ImageSpec, into: Path) -> tuple[list[str], Verdict | None]:
    """Export the image tower, and verify it on noise."""
    part = Part(module, spec.input, spec.output, IMAGE_GRAPH)
    files = _export(part, _noise(2, spec.size), into)
    batches = [_noise(size, spec.size) for size in _BATCHES]
    return files, _verify(part, [(batch, _run_module(module, batch)) for batch in batches], into)


def _any_length(tower: Any) -> Any:
    """Wrap the text tower to accept texts shorter than its context: open_clip's own only takes full ones."""
    import torch
    from open_clip.transformer import text_global_pool

    class AnyLength(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, ids: Any) -> Any:
            length = ids.shape[1]
            x = tower.token_embedding(ids) + tower.positional_embedding[:length]
            x = tower.ln_final(tower.transformer(x, attn_mask=tower.attn_mask[:length, :length]))
            x = text_global_pool(x, ids, tower.pool_type, eos_token_id=tower.eos_id)
            projection = tower.text_projection
            if projection is None:
                return x
            return projection(x) if isinstance(projection, torch.nn.Module) else x @ projection

    return AnyLength()


def _contrast(model: Any) -> ContrastSpec:
    logarithm, bias = float(model.logit_scale), getattr(model, "logit_bias", None)
    if not logarithm < _MAX_LOGARITHM:
        raise ModelFileError("is implausible; fetch the model again", file=WEIGHTS, key="logit_scale")
    return ContrastSpec(
        scale=math.exp(logarithm),
        bias=0.0 if bias is None else float(bias),
        activation="softmax" if bias is None else "sigmoid",
    )


def _pad(theirs: Any) -> int:
    """Return open_clip's padding id."""
    return int(theirs.tokenizer.pad_token_id) if hasattr(theirs, "tokenizer") else 0


def _refuse_open_clip(stated: JsonFile, text: JsonFile) -> None:
    """Reject models that need another repository, or that read texts as anything but one sequence of ids."""
    if "hf_model_name" in text:
        name = text.text("hf_model_name")
        raise text.refuse(
            "hf_model_name",
            f"the text tower is built from another repository's settings, {name!r}, which is not supported; use a "
            "model in transformers' format",
        )
    if "tokenizer_mode" in text:
        mode = text.text("tokenizer_mode")
        raise text.refuse("tokenizer_mode", f"{mode!r} is not supported; use another model")
    name = stated.object("vision_cfg").get("timm_model_name") or ""
    if ":" in str(name):
        raise stated.refuse("vision_cfg", f"{name!r} is another repository; only timm's names are supported")


def _refuse_timm(config: JsonFile) -> None:
    """Reject options that would leave weights out, or load them from elsewhere."""
    config.text("architecture")
    options = config.object("model_args")
    for name in options:
        if name.startswith("pretrained") or name in _OF_LOADING:
            raise config.refuse(f"model_args.{name}", "is not supported; use a model without it")
    # timm discards the head's weights if the two differ.
    stated = config.data.get("num_classes", config.object("pretrained_cfg").get("num_classes"))
    if options.get("num_classes", stated) != stated:
        raise config.refuse("model_args.num_classes", f"{options['num_classes']} is not {stated}, the num_classes")


def _tokenizer(theirs: Any, clean: str) -> Any:
    """Convert open_clip's or transformers' tokenizer to one of the tokenizers library."""
    if not hasattr(theirs, "tokenizer"):
        merges = sorted(theirs.bpe_ranks, key=theirs.bpe_ranks.__getitem__)
        special = [theirs.decoder[each] for each in theirs.all_special_ids]
        return byte_pairs(theirs.encoder, merges, special, clean or "lower")
    inner = getattr(theirs.tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ModelFileError("is missing; save the tokenizer again with transformers", file=TOKENIZER)
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(inner.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy = with_cleaning(copy, clean or "whitespace")
    return without_end(copy, theirs.tokenizer.sep_token, 0) if theirs.strip_sep_token else copy


def _samples(theirs: Any, tokenizer: Any) -> tuple[list[Array], Array]:
    """Return the sample texts as ids, without padding, and int64 [texts, context] as open_clip pads them. Raises
    VerificationFailed if the two differ in more than padding.

    Skips texts that ftfy repairs or that contain HTML entities: only open_clip decodes those.
    """
    from open_clip.tokenizer import basic_clean

    texts = [text for text in TEXTS if basic_clean(text) == text.strip()]
    want = theirs(texts).numpy().astype(np.int64)
    tokenizer.enable_truncation(int(want.shape[1]))
    rows = [np.array(each.ids, np.int64) for each in tokenizer.encode_batch(texts)]
    for text, row, right in zip(texts, rows, want, strict=True):
        if not np.array_equal(right[: len(row)], row) or len(set(right[len(row) :].tolist())) > 1:
            raise VerificationFailed(
                f"the tokenizer does not tokenize {text[:40]!r} like open_clip: {row[:8].tolist()} and not "
                f"{right[:8].tolist()}; use another model, and report this one"
            )
    return rows, want


def _is_free(tower: Any) -> bool:
    """Whether padding is never seen: texts are read from left to right, up to the pooled token."""
    causal = getattr(tower, "attn_mask", None) is not None
    return causal and tower.cls_emb is None and tower.pool_type in ("argmax", "eos")


def _labels(model: Any) -> tuple[str, ...]:
    """Return a classifier's labels in the order of its scores: those of its configuration, else ImageNet's class names
    if their number matches one of its editions, else LABEL_i. Empty for a feature extractor."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    count = int(model.num_classes or 0)
    stated = model.pretrained_cfg.get("label_names") or ()
    described = model.pretrained_cfg.get("label_descriptions") or {}
    names: list[str] = [f"LABEL_{place}" for place in range(count)]
    if isinstance(stated, dict):
        for place, name in stated.items():
            if str(place).isdecimal() and int(place) < count:
                names[int(place)] = str(described.get(name, name))
    elif len(stated) == count:
        names = [str(described.get(name, name)) for name in stated]
    elif stated:
        raise ModelFileError(
            f"{len(stated)} labels do not match {count} scores; fetch the model again",
            file=TIMM_CONFIG,
            key="label_names",
        )
    elif (subset := infer_imagenet_subset(model)) is not None:
        info = ImageNetInfo(subset)
        names = _disambiguate(info.label_descriptions(), info.label_names())
    return tuple(names[:count])


def _disambiguate(names: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Add their code to classes with equal names (crane)."""
    count = Counter(names)
    return [f"{name} ({code})" if count[name] > 1 else name for name, code in zip(names, codes, strict=True)]


def _noise(batch: int, size: tuple[int, int]) -> Array:
    return np.random.default_rng(batch).standard_normal((batch, 3, *size)).astype(np.float32)


def _size(module: Any) -> int:
    return sum(int(each.numel()) for each in module.parameters())


def _first(answer: Any) -> Any:
    """Return the pooled vector of towers that also return token vectors."""
    return answer[0] if isinstance(answer, tuple) else answer


def _run_module(module: Any, inputs: Array) -> Array:
    """Run PyTorch, in float32."""
    import torch

    with torch.inference_mode():
        rows: Array = _first(module(torch.from_numpy(inputs))).float().numpy()
    return rows


def _export(part: Part, inputs: Array, into: Path, *, free: bool = False) -> list[str]:
    """Write the graph and return its files. The batch may have any size, and texts any length if `free`."""
    import torch

    class Tower(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tower = part.module

        def forward(self, inputs: Any) -> Any:
            return _first(self.tower(inputs))

    shapes = {0: torch.export.Dim.DYNAMIC} | ({1: torch.export.Dim.DYNAMIC} if free else {})
    target = into / part.file
    with torch.no_grad():
        torch.onnx.export(
            Tower().eval(),
            (torch.from_numpy(inputs),),
            str(target),
            input_names=[part.input],
            output_names=[part.output],
            dynamic_shapes=(shapes,),
            opset_version=OPSET,
            dynamo=True,
            external_data=4 * _size(part.module) > INLINE_BYTES,
            verbose=False,
        )
    return [path.name for path in (target, target.with_name(f"{part.file}.data")) if path.is_file()]


def _verify(part: Part, compared: Sequence[tuple[Array, Array]], into: Path) -> Verdict | None:
    """Compare the graph with PyTorch's results over batches; None if no engine for graphs is installed. Raises
    VerificationFailed."""
    run: Callable[[dict[str, Array]], Array] | None = open_engine(into / part.file)
    if run is None:
        return None
    cosine, furthest = 1.0, 0.0
    for given, right in compared:
        got = run({part.input: given})
        if right.shape != got.shape:
            raise VerificationFailed(f"{part.file} gives {got.shape}, PyTorch {right.shape}; use another model")
        difference = float(np.abs(right - got).max() / max(float(np.abs(right).max()), 1e-6))
        furthest = max(furthest, difference if math.isfinite(difference) else math.inf)
        if right.shape[1] > 1:
            cosine = min(cosine, min_cosine(right, got))
    text = f"cosine >= {min(cosine, 1.0):.6f}, largest difference {furthest:.1e}"
    if not cosine >= MIN_COSINE or furthest > MAX_DIFFERENCE:
        raise VerificationFailed(f"{part.file} does not agree with PyTorch: {text}; use another model, and report this")
    return Verdict(f"the exported graph agrees with PyTorch: {text}", min(cosine, 1.0))


if __name__ == "__main__":
    main()
