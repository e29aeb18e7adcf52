"""Score images against texts with a dual encoder (CLIP, https://arxiv.org/abs/2103.00020; SigLIP,
https://arxiv.org/abs/2303.15343)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from shoal.core.input_errors import parse_input_index
from shoal.errors import EmptyInput, InputRejected, NotFinite, RequestError, ShoalError
from shoal.specs import ContrastSpec
from shoal.types import Array, Context, Embed, Embedded, Image, Vectors

INLINE: Final = 2**20
"""Maximum multiplications done on the event loop; larger products run in a thread."""

_Error = TypeVar("_Error", bound=ShoalError)


class ImageTextScores(NamedTuple):
    """`cosine` and `scores` are float32 [images, texts]; `scores` are the model's own. Softmax scores sum to 1 over the
    texts of an image, sigmoid scores are independent. `embedded` holds the texts first, then the images."""

    cosine: Vectors
    scores: Vectors
    embedded: Embedded


async def score_image_texts(
    run: Callable[[Embed, Context], Awaitable[Embedded]],
    model: str,
    images: Sequence[Image],
    texts: Sequence[str],
    ctx: Context,
    contrast: ContrastSpec,
) -> ImageTextScores:
    """Embed all inputs in one task and compare each image with each text.

    Raises EmptyInput if either list is empty, and the errors of `run`. An error about one of several inputs is prefixed
    "text 2: " or "image 0: ", with the 0-based index in its list.
    """
    if not images or not texts:
        raise EmptyInput("a comparison needs an image and a text: send at least one of each")
    try:
        embedded = await run(Embed(model=model, inputs=[*texts, *images]), ctx)
    except (InputRejected, NotFinite, RequestError) as error:
        raise _name_input(error, len(texts)) from error
    vectors: Vectors = embedded.vectors
    both = vectors[len(texts) :], vectors[: len(texts)]
    if len(texts) * vectors[len(texts) :].size <= INLINE:
        cosine, scores = compute_scores(*both, contrast)
    else:
        cosine, scores = await asyncio.to_thread(compute_scores, *both, contrast)
    return ImageTextScores(cosine, scores, embedded)


def compute_scores(images: Vectors, texts: Vectors, contrast: ContrastSpec) -> tuple[Vectors, Vectors]:
    """Return cosines and scores, float32 [p, t], of image vectors [p, d] and text vectors [t, d].

    Vectors need not be normalized; a zero vector has cosine 0. Computes in float64.
    """
    cosine: Array = np.clip(_normalize_rows(images) @ _normalize_rows(texts).T, -1.0, 1.0)
    scores = _apply_activation(cosine * contrast.scale + contrast.bias, contrast)
    return cosine.astype(np.float32), scores.astype(np.float32)


def _normalize_rows(vectors: Vectors) -> Array:
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    units: Array = wide / np.where(lengths > 0.0, lengths, 1.0)
    return units


def _apply_activation(logits: Array, contrast: ContrastSpec) -> Array:
    """Apply the activation in a form that never overflows, whatever the scale."""
    if contrast.activation == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Array = powers / powers.sum(axis=1, keepdims=True)
        return shares
    if contrast.activation == "sigmoid":
        small = np.exp(-np.abs(logits))
        likelihoods: Array = np.where(logits < 0.0, small, 1.0) / (1.0 + small)
        return likelihoods
    return logits


def _name_input(error: _Error, texts: int) -> _Error:
    """Return the error with the text or image named, if its message names an input."""
    at, message = parse_input_index(error)
    if at is None:
        return error
    what = f"text {at}" if at < texts else f"image {at - texts}"
    return error.with_message(f"{what}: {message}")
