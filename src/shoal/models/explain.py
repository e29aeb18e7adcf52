"""Explain how a stored model is read: what its files say, what runs, what was verified, and what differs from
sentence-transformers. All of it comes from the manifest, and from the published files where they are still there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import SourceError
from shoal.models.address import parse_source
from shoal.models.convert.contract import Contract, read_contract
from shoal.models.convert.contract.json_file import read_object
from shoal.models.manifest import Manifest
from shoal.models.prepare import SOURCE
from shoal.models.sources.folder import resolve
from shoal.models.sources.select import choose_in_folder, is_weights
from shoal.models.store import StoredModel
from shoal.specs import TextSpec

UNVERIFIED = "not compared with a second computation yet: that happens when it is first served"


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is read, each in words; "" for what it does not have.

    `family`: model_type and class of config.json. `way`: how its graph was made. `weights`, `settings`: published files
    that it was read from. `differs`: what sentence-transformers does otherwise.
    """

    family: str
    way: str
    weights: tuple[str, ...]
    settings: tuple[str, ...] = ()
    vectors: str = ""
    scores: str = ""
    pooling: str = ""
    normalization: str = ""
    prompts: str = ""
    max_length: str = ""
    images: str = ""
    verified: str
    differs: tuple[str, ...] = ()


def explain(stored: StoredModel) -> Explanation:
    """Explain a stored model. Blocks, to read its settings."""
    manifest, folder = stored.manifest, _published(stored)
    names = _settings(folder) if folder else ()
    text = manifest.text
    contract = read_contract(folder, foreign=True) if folder and text is not None and manifest.image is None else None
    explanation = Explanation(
        family=_describe_family(manifest, folder),
        way=manifest.conversion,
        weights=tuple(sorted(manifest.weights)),
        settings=names,
        images=_describe_images(manifest),
        verified=_describe_verification(manifest),
    )
    if text is None:
        return explanation
    return msgspec.structs.replace(
        explanation,
        max_length=_describe_length(text, contract),
        prompts=_describe_prompts(text),
        differs=tuple(_differences(text, manifest)),
        **_describe_outputs(text, names),
    )


def _published(stored: StoredModel) -> Path | None:
    """Return the folder of the published files; None if a model that was used in place has changed since."""
    kept, source = stored.path / SOURCE, parse_source(stored.manifest.source)
    if kept.is_dir() or source.scheme != "file":
        return kept if kept.is_dir() else None
    try:
        there = resolve(source)
    except SourceError:
        return None
    return Path(there.target) if there.revision == stored.manifest.revision else None


def _settings(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in choose_in_folder(folder) if not is_weights(name))


def _describe_family(manifest: Manifest, folder: Path | None) -> str:
    if manifest.generation is not None:
        return manifest.generation.architecture or "unknown"
    encoder = manifest.text.parts.encoder if manifest.text is not None and manifest.text.parts else ""
    config = read_object(folder, f"{encoder}/config.json" if encoder else "config.json") if folder else None
    if config is None:
        return "a table of static embeddings" if manifest.text and not manifest.text.frame_tokens else "unknown"
    classes = ", ".join(config.texts("architectures"))
    return f"{config.text('model_type', 'unknown')}{f' ({classes})' if classes else ''}"


def _describe_outputs(text: TextSpec, settings: Sequence[str]) -> dict[str, str]:
    """Describe what the model gives: scores, or vectors and how they come about."""
    if text.score is not None:
        what = "pairs" if text.score.pairs else "texts"
        labels = len(text.score.labels)
        return {"scores": f"of {what}: {labels} label{'s' * (labels != 1)}, {text.score.activation} activation"}
    about = {
        "dense": f"dense ({text.dimension} dimensions, {text.similarity} similarity)",
        "multi": f"multi ({text.multi.dimension if text.multi else 0} dimensions a token)",
    }
    found = {"vectors": ", ".join(about.get(kind, kind) for kind in text.kinds)}
    if text.dimension:
        said = next((name for name in settings if name.endswith("Pooling/config.json")), "")
        after = "".join(f", then {module}" for module in text.modules)
        found["pooling"] = f"{text.pooling} ({said or 'no file says: the default'}){after}"
        found["normalization"] = (
            "a Normalize module ends the model" if text.ends_normalized else "none in the model; on request, by default"
        )
    return found


def _describe_length(text: TextSpec, contract: Contract | None) -> str:
    file, key = contract.max_tokens_at if contract else ("", "")
    said = f" ({file}: {key})" if file else ""
    padded = f", padded to {text.pad_to}" if text.pad_to else ""
    return f"{text.max_tokens} tokens with special ones{said}{padded}"


def _describe_prompts(text: TextSpec) -> str:
    named = "; ".join(f"{name}: {prompt!r}" for name, prompt in text.prompts.items())
    default = f"; default: {text.default_prompt_name}" if text.default_prompt_name else ""
    pooled = "" if text.include_prompt else "; their tokens are left out of pooling"
    return f"{named}{default}{pooled}" if named else "none"


def _describe_images(manifest: Manifest) -> str:
    if manifest.image is None:
        return ""
    height, width = manifest.image.spec.size
    return f"{width} x {height} pixels, in {manifest.image.graph}"


def _describe_verification(manifest: Manifest) -> str:
    if manifest.generation is not None:
        return "by generating a first token at each load"
    return manifest.verification_summary or UNVERIFIED


def _differences(text: TextSpec, manifest: Manifest) -> list[str]:
    """Return what a user of sentence-transformers would notice."""
    found = []
    if text.score is None and text.dimension and not text.ends_normalized:
        found.append(
            'vectors get unit length unless a request says `"normalize": false`; there they are as the model gives them'
        )
    if text.ends_normalized and text.dimension and text.pooled == text.sentence_embedding:
        found.append('the shipped graph gives only normalized vectors: `"normalize": false` is refused')
    if manifest.verification is not None and "itself" in manifest.verification.text:
        found.append("no weights to compare with: the graph agrees with itself, not with another computation")
    found.append("longer texts are cut and counted in `x-shoal-truncated`; there they are cut silently")
    return found
