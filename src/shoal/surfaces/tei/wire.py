"""JSON types of text-embeddings-inference, from router/src/http/types.rs of
https://github.com/huggingface/text-embeddings-inference.

`model` is Shoal's addition: the original serves one model and has no model names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import TokenId

Inputs: TypeAlias = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(
        description="A text, one list of token ids, or a list that holds texts and lists of token ids in any mixture.",
        examples=["What is Deep Learning?", ["first text", "second text"]],
    ),
]
MaybeModel: TypeAlias = (
    Annotated[str, Meta(description="Name or alias of a served model. Default: the first one that supports the task.")]
    | None
)
MaybeTruncate: TypeAlias = (
    Annotated[bool, Meta(description="Truncate inputs that are too long instead of rejecting them.")] | None
)
MaybeSide: TypeAlias = (
    Annotated[Literal["right", "left", "Right", "Left"], Meta(description="End to truncate. Default: right.")] | None
)
MaybePrompt: TypeAlias = (
    Annotated[str, Meta(description="Name of a prompt of the model, prepended to every text.")] | None
)
MaybeRaw: TypeAlias = (
    Annotated[bool, Meta(description="Logits, without sigmoid (one label) or softmax. Default: false.")] | None
)


class TeiEmbedRequest(msgspec.Struct, kw_only=True):
    inputs: Inputs
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    prompt_name: MaybePrompt = None
    normalize: Annotated[bool, Meta(description="Normalize vectors to unit length. Default: true.")] | None = None
    dimensions: (
        Annotated[int, Meta(ge=0, description="Truncate vectors to this length, then normalize them.")] | None
    ) = None
    model: MaybeModel = None


class TeiInputsRequest(msgspec.Struct, kw_only=True):
    """Texts for vectors that cannot be normalized or cut."""

    inputs: Inputs
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    prompt_name: MaybePrompt = None
    model: MaybeModel = None


class TeiSparseValue(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="A token of the model's vocabulary.")]
    value: float


class TeiRerankRequest(msgspec.Struct, kw_only=True):
    query: str
    texts: Annotated[list[str], Meta(description="Texts to score against the query.", examples=[["first", "second"]])]
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    raw_scores: MaybeRaw = None
    return_text: Annotated[bool, Meta(description="Return each text with its score. Default: false.")] | None = None
    model: MaybeModel = None


class TeiRank(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: Annotated[int, Meta(description="Index of the text in the request.")]
    text: str | msgspec.UnsetType = msgspec.UNSET
    score: float


class TeiPredictRequest(msgspec.Struct, kw_only=True):
    inputs: Annotated[
        str | list[str | list[str]],
        Meta(
            description="A text; `[text, text]`: two texts read together as one input; `[[text], [text, "
            "text]]`: several inputs.",
            examples=["I like you.", ["A premise.", "A hypothesis."], [["I like you."], ["I do not."]]],
        ),
    ]
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    raw_scores: MaybeRaw = None
    model: MaybeModel = None


class TeiPrediction(msgspec.Struct, kw_only=True):
    score: float
    label: str


class TeiSentences(msgspec.Struct, kw_only=True):
    source_sentence: str
    sentences: Annotated[list[str], Meta(description="Texts to compare with the source.")]


class TeiSimilarityParameters(msgspec.Struct, kw_only=True):
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    prompt_name: MaybePrompt = None


class TeiSimilarityRequest(msgspec.Struct, kw_only=True):
    inputs: TeiSentences
    parameters: TeiSimilarityParameters | None = None
    model: MaybeModel = None


class TeiTokenizeRequest(msgspec.Struct, kw_only=True):
    inputs: Annotated[str | list[str], Meta(examples=["What is Deep Learning?"])]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    model: MaybeModel = None


class TeiToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    special: bool
    start: Annotated[int | None, Meta(description="Start, in UTF-8 bytes of prompt and text.")]
    stop: Annotated[int | None, Meta(description="End.")]


class TeiDecodeRequest(msgspec.Struct, kw_only=True):
    ids: Annotated[
        list[TokenId | list[TokenId]],
        Meta(description="One list of token ids, or a list of such lists.", examples=[[101, 7592, 102]]),
    ]
    skip_special_tokens: bool | None = None
    model: MaybeModel = None


class TeiDefaultRequest(msgspec.Struct, kw_only=True):
    """The fields of the default model's own route: `query` and `texts` for a reranker, else `inputs`."""

    inputs: Annotated[Any, Meta(description="As for /embed, /embed_sparse, /predict or /similarity.")] = None
    query: str | None = None
    texts: list[str] | None = None
    truncate: MaybeTruncate = None
    truncation_direction: MaybeSide = None
    prompt_name: MaybePrompt = None
    normalize: bool | None = None
    dimensions: int | None = None
    raw_scores: MaybeRaw = None
    return_text: bool | None = None
    parameters: TeiSimilarityParameters | None = None
    model: MaybeModel = None


class TeiVertexRequest(msgspec.Struct, kw_only=True):
    instances: Annotated[list[dict[str, Any]], Meta(description="Bodies of requests to the default model.")]


class TeiVertexResponse(msgspec.Struct, kw_only=True):
    predictions: Annotated[list[Any], Meta(description="The response to each, in order.")]


class TeiPooling(msgspec.Struct, kw_only=True):
    pooling: str


class TeiLabels(msgspec.Struct, kw_only=True):
    id2label: dict[str, str]
    label2id: dict[str, int]


class TeiModelType(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The type of a model. Exactly one field is present."""

    embedding: TeiPooling | msgspec.UnsetType = msgspec.UNSET
    classifier: TeiLabels | msgspec.UnsetType = msgspec.UNSET
    reranker: TeiLabels | msgspec.UnsetType = msgspec.UNSET


class TeiInfo(msgspec.Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: TeiModelType
    max_concurrent_requests: Annotated[int, Meta(description="Items that may wait: max_queue_items.")]
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: Annotated[int, Meta(description="Inputs that one request may hold: max_inputs.")]
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class TeiError(msgspec.Struct, kw_only=True):
    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
