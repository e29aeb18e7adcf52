"""The checked content of a model's files: input of graph building, of the numpy reference and of the TextSpec."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from shoal.models.convert.contract.architecture import Activation, Encoder
from shoal.models.convert.contract.lengths import Length
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec

PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Combines token vectors to one vector; several modes are concatenated in this order."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True


class Dense(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """`activation(x @ weight.T + bias)`; `path` is the module's folder, which contains its safetensors.

    `residual`: add x, through a separate matrix if the sizes differ. `file`: a safetensors file with the weights;
    `stem` precedes the names `weight` and `bias` in it.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool = False
    file: str = ""
    stem: str = "linear."

    @property
    def place(self) -> str:
        """A name that distinguishes the layer's weights from others in a graph."""
        return self.path or self.file or self.stem.rstrip(".")


class LayerNorm(msgspec.Struct, frozen=True, kw_only=True, tag="layer_norm"):
    path: str
    dimension: int


class Normalize(msgspec.Struct, frozen=True, kw_only=True, tag="normalize"):
    """x / max(|x|, 1e-12)."""


class Truncate(msgspec.Struct, frozen=True, kw_only=True, tag="truncate"):
    """Keeps the first `dimension` numbers of a vector, as for a Matryoshka model."""

    dimension: int


AfterPooling: TypeAlias = Dense | LayerNorm | Normalize | Truncate


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A static model's vectors, one per token id: `tensor` float [stored, width] in the safetensors of `path`.

    `mapping`: tensor with the row of each id ("": the id is the row); `weights`: tensor with a factor for each id.
    `ids`: number of ids. `dropped`: ids to ignore.
    """

    path: str
    tensor: str
    stored: int
    width: int
    ids: int
    mapping: str = ""
    weights: str = ""
    dropped: tuple[int, ...] = ()


class Splade(msgspec.Struct, frozen=True, kw_only=True):
    """Weights over the vocabulary from a masked language model's logits: log(1 + relu(logit)), with the logarithm
    applied twice for "log1p_relu", as the maximum or the sum over the tokens. `tied`: the last layer is the word
    embeddings, unless the weights contain another. `dense_bias`, `inner`: bias and activation of the language model's
    own dense layer; `inner` None: the family's."""

    strategy: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    tied: bool = True
    dense_bias: bool = True
    inner: Activation | None = None


class TokenWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A weight for each token read, computed by `layer` from its vector; `skipped` ids have none (bge-m3)."""

    layer: Dense
    skipped: tuple[int, ...]


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """Late-interaction vectors: `layers` over each token's vector, then unit length. `spec`: how texts are read.
    `query_length`, `document_length`: where the files state them, None if they do not."""

    layers: tuple[Dense, ...]
    spec: MultiSpec
    query_length: Length | None = None
    document_length: Length | None = None


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids whose logits make a language model's score: that of `true`, minus that of `false` if there is one.
    `tied`: the last layer is the word embeddings, unless the weights contain another."""

    true: int
    false: int | None = None
    tied: bool = True

    @property
    def ids(self) -> tuple[int, ...]:
        return (self.true,) if self.false is None else (self.true, self.false)


class Classifier(msgspec.Struct, frozen=True, kw_only=True):
    """A head over the token vectors, one logit for each label of `spec`: their `pooling`, `dense` with `activation`,
    `norm` (of the encoder's kind), then `out`. An empty name means that the part is absent.

    The names are those of layers in the weights, beside or inside the encoder. `unread`: a token id that is never the
    last one. `answers`: `out` is the last layer of a language model, of which only these rows are read. `segments`:
    the encoder is given token_type_ids, the text that each token belongs to. Without an `Encoder`, only `spec` is
    meaningful.
    """

    spec: ScoreSpec
    pooling: Literal["cls", "mean", "lasttoken"] = "cls"
    dense: str = ""
    dense_bias: bool = True
    activation: Activation = "identity"
    norm: str = ""
    out: str = ""
    out_bias: bool = True
    unread: int | None = None
    answers: Answers | None = None
    segments: bool = False


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the files of a text model specify.

    `encoder_path` is the folder of config.json, weights and tokenizer inside the model's folder ("" for its root).
    `encoder` is None if only a shipped ONNX graph can run the model. `modules` follow the pooling, in order.
    `max_tokens` counts special tokens; `max_tokens_at` is the file and key that state it. `vocab_size` is 0 if no file
    states it.

    A model with a `classifier` scores texts and does not embed them: `pooling` and `modules` are then meaningless, and
    `dimension` is 0. A `table` replaces the encoder. With `splade`, or `late` without pooling, `dimension` is 0 too; a
    model with dense vectors (bge-m3) may also have `token_weights` and `late`.
    """

    encoder_path: str
    encoder: Encoder | None
    pooling: Pooling
    modules: tuple[AfterPooling, ...]
    dimension: int
    max_tokens: int
    max_tokens_at: tuple[str, str] = ("", "")
    pad_id: int = 0
    vocab_size: int = 0
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    classifier: Classifier | None = None
    table: Table | None = None
    splade: Splade | None = None
    token_weights: TokenWeights | None = None
    late: Late | None = None

    @property
    def sparse(self) -> SparseSpec | None:
        """The sparse vectors of the model, or None."""
        if self.splade is not None:
            return SparseSpec()
        if self.token_weights is not None:
            return SparseSpec(output="token_weights", per="token", skipped=self.token_weights.skipped)
        return None

    @property
    def ends_normalized(self) -> bool:
        return bool(self.modules) and isinstance(self.modules[-1], Normalize)

    def file(self, name: str) -> str:
        """Return the path of a file beside config.json, inside the model's folder."""
        return f"{self.encoder_path}/{name}" if self.encoder_path else name
