"""The vector space of a stored model, as a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.models.store import StoredModel
from shoal.specs import TextSpec


def stored_space(stored: StoredModel) -> str:
    """Return 16 hex digits that are equal only for vectors that may share an index; "" for a model without vectors.

    They cover the published weights and what the text specification does to a vector. They do not cover the converted
    graph, whose bytes may change with the converter, or a published graph beside safetensors, which holds the same
    weights.
    """
    text, image = stored.manifest.text, stored.manifest.image
    if (text is not None and text.score is not None) or (image is not None and image.spec.score is not None):
        return ""
    return hash_weights(stored)


def hash_weights(stored: StoredModel) -> str:
    """Return the digits of `stored_space`, also for a model without vectors."""
    weights, image = stored.manifest.weights, stored.manifest.image
    identity: list[Any] = [sorted(digest for file, digest in weights.items() if not _is_exported_copy(file, weights))]
    if image is not None:
        identity += [image.spec, stored.manifest.text]
        return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]
    spec: TextSpec = stored.manifest.text_spec
    identity += [
        spec.pooling,
        spec.modules,
        sorted(spec.prompts.items()),
        spec.default_prompt_name,
        spec.include_prompt,
        spec.lower_case,
        spec.max_tokens,
        # What goes beyond one dense vector per text. A missing part does not change the digits.
        *(each for each in (spec.sparse, spec.multi, spec.score) if each is not None),
        *((spec.embedding_tasks, spec.default_embedding_task) if spec.embedding_tasks else ()),
        *(() if spec.frame_tokens and not spec.dropped else (spec.frame_tokens, spec.dropped)),
    ]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]


def _is_exported_copy(file: str, weights: Mapping[str, str]) -> bool:
    """Return whether a published file is a graph next to the weights that it was exported from."""
    folder, graph, _ = file.rpartition("model.onnx")
    folder = folder.removesuffix("onnx/")
    return bool(graph) and any(
        other.startswith(f"{folder}model") and other.endswith(".safetensors") for other in weights
    )
