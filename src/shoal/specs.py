"""How a model's inputs are made and its outputs read: what the readers of its files write and the pipelines follow.

Kept in the manifest of a stored model; plain frozen structs like those of `types`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from shoal.types import TaskKind, VectorKind  # imports numpy, which completing a name in a shell must not

Activation: TypeAlias = Literal["identity", "sigmoid", "softmax"]


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """Makes one text of a query and a document: the Jinja `source` of a model's `file`, over messages with the roles
    "system" (a prompt, if there is one), "query" and "document", as sentence-transformers reads them.

    `structured`: contents are lists of parts, not texts. `variables`: further ones, special tokens included. `apart`: a
    mark in the text, at which it is split into parts that are tokenized apart ("": it is tokenized as a whole).
    `max_query`: tokens to which the part with the query is then cut; `max_pair`: those from it to the document's.
    """

    source: str
    file: str
    structured: bool = False
    variables: dict[str, Any] = {}
    apart: str = ""
    max_query: int | None = None
    max_pair: int | None = None


class ScoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A classifier's or cross-encoder's head: `output` float32 [b, labels] holds logits. `activation` is what the model
    puts over them where raw scores were not asked for; with one label it is a reranker. `pairs`: it was trained on two
    texts; a text alone is read as one. `template`: a pair is one text made by it, and nothing else is read."""

    labels: tuple[str, ...]
    activation: Activation
    output: str = "logits"
    pairs: bool = True
    template: PairTemplate | None = None


class SparseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head of weights by token of the vocabulary. `per` "vocabulary": `output` float32 [b, vocabulary], final
    (SPLADE: the largest log(1 + relu(logit)) over the tokens read). `per` "token": `output` float32 [b, l], one weight
    for each token read; an id's weight is its largest, and ids of `skipped` have none (bge-m3)."""

    output: str = "sparse_embedding"
    per: Literal["vocabulary", "token"] = "vocabulary"
    skipped: tuple[int, ...] = ()


class MultiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head of late interaction: `output` float32 [b, l, dimension], unit vectors.

    `query_marker` and `document_marker` are token ids put after the first special token (None: none). A query is filled
    up to `query_length` tokens with `fill_id` (None: it is not), which are `attended` or not, and their vectors count.
    Of a document, vectors of `skipped` token ids are left out, and it is cut to `document_length`. `drop_first`: the
    first token's vector is left out of both (bge-m3). Prompts come before the text as for dense vectors.
    """

    dimension: int
    output: str = "multi_vectors"
    query_marker: int | None = None
    document_marker: int | None = None
    query_length: int | None = None
    document_length: int | None = None
    fill_id: int | None = None
    attended: bool = False
    skipped: tuple[int, ...] = ()
    drop_first: bool = False


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A module over vectors, with its weights in the folder that a model was published in.

    `kind` "dense": activation(x @ weight.T + bias) of x with `takes` numbers, `dimension` come out; with `residual` x
    is added to that, through the matrix `residual.weight` where the two differ. "layer_norm": over `dimension` numbers.
    "truncate": the first `dimension` alone. `path`: the folder of its safetensors; with `file` they are that one file.
    `stem` stands before the names `weight` and `bias` in it.
    """

    kind: Literal["dense", "layer_norm", "normalize", "truncate"]
    takes: int = 0
    dimension: int = 0
    path: str = ""
    file: str = ""
    stem: str = "linear."
    activation: str = "identity"
    bias: bool = True
    residual: bool = False


class PartsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around a model's encoder and where it lies in the folder that the model was published in, for engines
    that run this folder and no graph.

    `encoder`: the folder of config.json. `after`: over a pooled vector, as `TextSpec.modules` names them. `late`: over
    each token's vector, before it is made a unit vector. `token_weights`: from a token's vector to its one weight.
    `splade`: how logits become weights, (over the tokens, of log(1 + relu) or of the logarithm twice). `answers`: the
    token ids of a language model that scores by the logit of the first, minus that of the second if there is one.
    """

    encoder: str = ""
    after: tuple[LayerSpec, ...] = ()
    late: tuple[LayerSpec, ...] = ()
    token_weights: LayerSpec | None = None
    splade: tuple[Literal["max", "sum"], Literal["relu", "log1p_relu"]] = ("max", "relu")
    answers: tuple[int, ...] = ()


class TextSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a text model's inputs are made and its outputs read, as the files of the model say; kept in its manifest.

    `tokenizer`: path of tokenizer.json inside the model's folder. `inputs`: the graph's input names, of `input_ids`,
    `attention_mask`, `token_type_ids`, `position_ids`, `pooling_mask`, `adapter_ids`. `max_tokens` counts special
    tokens.
    `lower_case`: do_lower_case of the sentence_bert_config (beyond what the tokenizer does itself).
    `modules` names what follows the pooling, in order ("dense:tanh", "layer_norm", "normalize").
    `include_prompt` False: the prompt's tokens are left out of pooling (`pooling_mask`).
    `sentence_embedding` names the output of all modules, `pooled` the one before a final Normalize (the same name when
    the model ends without one); `ends_normalized` says whether a Normalize module ends the model.
    A shipped graph may give only normalised vectors: then `ends_normalized` is true and both names are the same.
    `tokens` names the output of token vectors, float32 [b, l, width] ("": it has none). `score`, `sparse`, `multi`: the
    heads it has. A model without dense vectors has dimension 0. `frame_tokens` False: no special tokens are added to a
    text (static models), and ids of `dropped` are taken out of it before the model reads it. `parts`: for engines that
    run the model's folder; None where nobody read it.
    `pad_to`: every text is filled with `pad_id` on the right up to so many tokens, which the model attends to like any
    other (SigLIP); 0: only as far as its batch needs. `cleaning` "canonical": what SiglipTokenizer does to a text
    beyond the tokenizer.json, after `lower_case`: ASCII punctuation goes, runs of white space become one blank, and
    none stays at the ends.
    `embedding_tasks`: purposes for which the model has an adapter each (Jina's v3), in the order of `adapter_ids`,
    which start at 1; each is a name of `prompts`, too. `default_embedding_task`: for texts without a task (None: no
    adapter).
    """

    tokenizer: str
    inputs: tuple[str, ...]
    dimension: int
    max_tokens: int
    pad_id: int = 0
    vocab_size: int = 0
    lower_case: bool = False
    include_prompt: bool = True
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    pooling: str = "mean"
    modules: tuple[str, ...] = ()
    similarity: str = "cosine"
    sentence_embedding: str = "sentence_embedding"
    pooled: str = "pooled"
    ends_normalized: bool = True
    tokens: str = ""
    score: ScoreSpec | None = None
    sparse: SparseSpec | None = None
    multi: MultiSpec | None = None
    frame_tokens: bool = True
    dropped: tuple[int, ...] = ()
    parts: PartsSpec | None = None
    pad_to: int = 0
    cleaning: Literal["", "canonical"] = ""
    embedding_tasks: tuple[str, ...] = ()
    default_embedding_task: str | None = None

    @property
    def tasks(self) -> tuple[TaskKind, ...]:
        """What the model can do. One label makes a reranker, which can be asked for its score as a class too."""
        if self.score is None:
            return ("embed",)
        return ("rerank", "classify") if len(self.score.labels) == 1 else ("classify",)

    @property
    def kinds(self) -> tuple[VectorKind, ...]:
        """The vectors that it gives, the first of them where a client names none."""
        if self.score is not None:
            return ()
        has: dict[VectorKind, bool] = {
            "dense": self.dimension > 0,
            "sparse": self.sparse is not None,
            "multi": self.multi is not None,
            "tokens": bool(self.tokens),
        }
        return tuple(kind for kind, there in has.items() if there)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Every output that its graph has, by name."""
        if self.score is not None:
            return (self.score.output,)
        dense = (self.sentence_embedding, self.pooled) if self.dimension else ()
        heads = (self.sparse.output if self.sparse else "", self.multi.output if self.multi else "", self.tokens)
        return tuple(dict.fromkeys(name for name in (*dense, *heads) if name))


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes the input of an image tower, as the model's preprocessor says, and where its vectors are.

    `input`: float32 [b, 3, height, width] in RGB, with (height, width) = `size`. `output`: float32 [b, dimension], not
    scaled. In this order, each step in the precision of the reference: `resize` "shortest" (the shorter side becomes
    `edge`, the longer one follows, rounded down) or "squash" (to `size`, whatever the shape) by Pillow's filter
    `resample`; `crop` to (height, width) from the middle, zeros outside; times `rescale`; minus `mean`, divided by
    `std`, by channel. `centre`: where the middle of a side begins that is larger by an odd number of pixels: at half of
    it rounded "down" (transformers), or to the "even" number (torchvision). `score`: of a classifier, which has logits
    in the place of vectors, and dimension 0.
    """

    size: tuple[int, int]
    dimension: int
    input: str = "pixel_values"
    output: str = "image_embeds"
    resize: Literal["", "shortest", "squash"] = "shortest"
    edge: int = 0
    resample: int = 3
    crop: tuple[int, int] | None = None
    centre: Literal["down", "even"] = "down"
    rescale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    score: ScoreSpec | None = None

    @property
    def tasks(self) -> tuple[TaskKind, ...]:
        """What the tower can do."""
        return ("embed",) if self.score is None else ("classify",)


class ContrastSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an image and texts are compared: `activation` over cosine * `scale` + `bias` ("softmax" over the texts of
    one image, CLIP; "sigmoid" of each, SigLIP)."""

    scale: float
    bias: float = 0.0
    activation: Activation = "softmax"
