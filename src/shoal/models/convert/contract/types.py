"""The checked content of a model's files: input of graph building, of the numpy reference and of the TextSpec."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from shoal.models.convert.contract.lengths import Length
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec

Family: TypeAlias = Literal["bert", "roberta", "mpnet", "distilbert"]
Activation: TypeAlias = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "silu"]
PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer encoder of a known family, with the numbers of its config.json.

    `family` is the layout of its tensors: XLM-R and CamemBERT are "roberta", ELECTRA is "bert". `prefix` may precede
    each tensor's name. `position_offset`: the first real token's row in the position table.
    """

    family: Family
    prefix: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int
    norm_eps: float
    activation: Activation
    pad_id: int
    position_offset: int = 0
    token_types: int = 0

    @property
    def usable_positions(self) -> int:
        """The longest input in tokens that the position table allows."""
        return self.max_positions - self.position_offset


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
    embeddings, unless the weights contain another."""

    strategy: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    tied: bool = True


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


class Classifier(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence classifier's head: `activation(first token @ dense)`, then `out`, one logit for each label of `spec`.

    `dense` and `out` name two linear layers in the weights, beside or inside the encoder. `segments`: the encoder is
    given token_type_ids, the text that each token belongs to. Without an `Encoder`, only `spec` is meaningful.
    """

    spec: ScoreSpec
    dense: str = ""
    out: str = ""
    activation: Activation = "tanh"
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
