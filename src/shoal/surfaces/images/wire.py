"""JSON types of /rank, which ranks texts against pictures."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shoal.specs import Activation
from shoal.surfaces.shared.wire_inputs import ImageLink, PictureHeaders, Usage

Picture: TypeAlias = Annotated[
    str | ImageLink,
    Meta(description="An http(s) URL where the operator allows it, a data URI, or the base64 of a file; or `{url}`."),
]


class PictureRankRequest(msgspec.Struct, kw_only=True):
    """One `image`, or several `images`, against `texts`."""

    texts: Annotated[list[str], Meta(description="What the picture may show.", examples=[["a cat", "a dog"]])]
    image: Picture | None = None
    images: Annotated[list[Picture], Meta(description="Instead of `image`: each against all texts.")] | None = None
    model: (
        Annotated[
            str,
            Meta(description="A served model, by name or alias. Default: the first one that compares the two."),
        ]
        | None
    ) = None
    top_n: (
        Annotated[int, Meta(ge=0, description="How many texts of a picture, the best ones. Default and 0: all.")] | None
    ) = None
    image_download_headers: PictureHeaders = msgspec.UNSET


class RankedPictureText(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Place of the text in the request.")]
    text: str
    cosine: Annotated[float, Meta(description="-1 to 1.")]
    score: Annotated[float, Meta(description="What the model makes of the cosine, by its scale, and `activation`.")]


class PictureRankResponse(msgspec.Struct, kw_only=True):
    """The ranking for the request's `image`."""

    model: str
    activation: Annotated[
        Activation,
        Meta(description="softmax: scores of a picture's texts add up to 1; sigmoid: each is by itself."),
    ]
    results: Annotated[list[RankedPictureText], Meta(description="The best first; of equal scores the earlier text.")]
    usage: Usage


class RankedPicture(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Place of the picture in the request.")]
    results: list[RankedPictureText]


class PicturesRankResponse(msgspec.Struct, kw_only=True):
    """A ranking for each of the request's `images`."""

    model: str
    activation: Activation
    images: Annotated[list[RankedPicture], Meta(description="In the order of the request.")]
    usage: Usage
