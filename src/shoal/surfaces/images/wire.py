"""JSON types of /rank, which ranks texts against images."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shoal.specs import Activation
from shoal.surfaces.shared.wire_inputs import ImageHeaders, ImageLink, Usage

ImageSource: TypeAlias = Annotated[
    str | ImageLink,
    Meta(description="An http(s) URL if the operator allows it, a data URI, or a base64-encoded file; or `{url}`."),
]


class ImageRankRequest(msgspec.Struct, kw_only=True):
    """One `image`, or several `images`, against `texts`."""

    texts: Annotated[
        list[str], Meta(description="Descriptions to compare with the image.", examples=[["a cat", "a dog"]])
    ]
    image: ImageSource | None = None
    images: (
        Annotated[
            list[ImageSource], Meta(description="Instead of `image`: several images, each compared with all texts.")
        ]
        | None
    ) = None
    model: (
        Annotated[
            str,
            Meta(
                description="Name or alias of a served model. Default: the first one that compares images with texts."
            ),
        ]
        | None
    ) = None
    top_n: (
        Annotated[
            int, Meta(ge=0, description="Maximum texts to return for each image, best first. Default and 0: all.")
        ]
        | None
    ) = None
    image_download_headers: ImageHeaders = msgspec.UNSET


class RankedImageText(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Index of the text in the request.")]
    text: str
    cosine: Annotated[float, Meta(description="From -1 to 1.")]
    score: Annotated[float, Meta(description="The cosine after the model's scale and `activation`.")]


class ImageRankResponse(msgspec.Struct, kw_only=True):
    """The ranking for the request's `image`."""

    model: str
    activation: Annotated[
        Activation,
        Meta(description="softmax: the scores of an image's texts add up to 1; sigmoid: each score is independent."),
    ]
    results: Annotated[
        list[RankedImageText], Meta(description="Sorted by descending score; ties keep the request's order.")
    ]
    usage: Usage


class RankedImage(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Index of the image in the request.")]
    results: list[RankedImageText]


class ImagesRankResponse(msgspec.Struct, kw_only=True):
    """A ranking for each of the request's `images`."""

    model: str
    activation: Activation
    images: Annotated[list[RankedImage], Meta(description="In the order of the request.")]
    usage: Usage
