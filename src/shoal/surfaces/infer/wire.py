"""JSON types of the `infer` surface, those of the sentence-transformers inference server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_models import Backend, TextIn

Name = Annotated[str, Meta(description="The model. `name` is accepted too.", examples=["intfloat/e5-small-v2"])]
ClipName = Annotated[str, Meta(description="The model, as named by open_clip.", examples=["ViT-B-32"])]
Pretrained = Annotated[
    str,
    Meta(
        description="The checkpoint of an open_clip model, which is served as `NAME/CHECKPOINT`. If no such model is "
        "served, only the name counts.",
        examples=["laion2b_s34b_b79k"],
    ),
]
Texts = Annotated[str | list[str], Meta(description="A text or a list of texts.", examples=["a cat"])]
Images = Annotated[
    str | list[str],
    Meta(
        description="An image or a list of images: an http(s) URL that the server may fetch, a data URI, or a "
        "base64-encoded file."
    ),
]
Dimensions = Annotated[int, Meta(ge=1, description="Truncate vectors to this length, then normalize them.")]
DownloadHeaders = Annotated[
    dict[str, str], Meta(description="Headers for fetching images, sent only to hosts that the server lists by name.")
]
Labels = Annotated[
    list[str], Meta(description="Labels to compare with the image, for a model that compares images with texts.")
]
File = Annotated[
    str,
    Meta(description="An image file. A text field is read as in JSON.", extra_json_schema={"format": "binary"}),
]
Milliseconds = Annotated[float, Meta(description="Time since the request arrived.")]


class LoadRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    backend: Backend | None = None
    text_in: TextIn | None = None


class LoadClipRequest(msgspec.Struct, kw_only=True):
    model_name: ClipName
    pretrained: Pretrained | None = None
    backend: Backend | None = None
    text_in: TextIn | None = None


class LoadAnyRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    library: Annotated[str | None, Meta(description="Not needed: the model's files define it.")] = None
    pretrained: Pretrained | None = None
    backend: Backend | None = None
    text_in: TextIn | None = None


class NamedRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    pretrained: Pretrained | None = None


class _Vectors(msgspec.Struct, kw_only=True):
    model_name: Name
    pretrained: Pretrained | None = None
    normalize: bool = True
    n_dims: Dimensions | None = None
    also_n_dims: Dimensions | None = msgspec.field(name="nDims", default=None)

    @property
    def dimensions(self) -> int | None:
        return self.n_dims or self.also_n_dims


class InferTextRequest(_Vectors, kw_only=True):
    text: Texts


class InferImageRequest(_Vectors, kw_only=True):
    image: Images
    image_download_headers: DownloadHeaders | None = None
    also_headers: DownloadHeaders | None = msgspec.field(name="imageDownloadHeaders", default=None)


class InferRequest(_Vectors, kw_only=True):
    text: Texts | None = None
    image: Images | None = None
    image_download_headers: DownloadHeaders | None = None
    also_headers: DownloadHeaders | None = msgspec.field(name="imageDownloadHeaders", default=None)


class ClassifyImageRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    image: Images
    pretrained: Pretrained | None = None
    labels: Labels | None = None
    image_download_headers: DownloadHeaders | None = None
    also_headers: DownloadHeaders | None = msgspec.field(name="imageDownloadHeaders", default=None)


class InferImageForm(_Vectors, kw_only=True):
    image: list[File]


class InferForm(_Vectors, kw_only=True):
    text: list[str] = []
    image: list[File] = []


class ClassifyImageForm(msgspec.Struct, kw_only=True):
    model_name: Name
    image: list[File]
    pretrained: Pretrained | None = None
    labels: Labels = []


class Message(msgspec.Struct, kw_only=True):
    message: str


class LoadedModels(msgspec.Struct, kw_only=True):
    models: list[str]


class RepositoryModel(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: Annotated[str, Meta(description="Why the model is not ready.")] = ""
    managed: Annotated[bool, Meta(description="False: not created by Shoal, which cannot delete it.")] = True


class RepositoryModels(msgspec.Struct, kw_only=True):
    models: list[RepositoryModel]


class TextEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[list[float]]
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class NewerEmbedding(msgspec.Struct, kw_only=True):
    embeddings: list[list[float]]
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class Embeddings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The vectors of texts and images. A side that was not requested is absent."""

    text_embeddings: list[list[float]] = []
    image_embeddings: list[list[float]] = []
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class Probabilities(msgspec.Struct, kw_only=True):
    probabilities: Annotated[
        list[list[float]], Meta(description="For each image, one value per label, in the order of the labels.")
    ]
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class ModelLabels(msgspec.Struct, kw_only=True):
    labels: list[str]


class EmbeddingSize(msgspec.Struct, kw_only=True):
    size: int = msgspec.field(name="embeddingSize")


class Detail(msgspec.Struct, kw_only=True):
    detail: str


class Problem(msgspec.Struct, kw_only=True):
    type: str
    loc: Annotated[list[str | int], Meta(description="Location in the request: `body`, then field and index.")]
    msg: str
    input: Annotated[Any, Meta(description="The invalid value; null if it is long.")]


class Problems(msgspec.Struct, kw_only=True):
    detail: list[Problem]
