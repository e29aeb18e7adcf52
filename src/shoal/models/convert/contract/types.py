"""What a model's files say, checked: the input of graph building, of the numpy reference and of the TextSpec."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from shoal.models.convert.contract.lengths import Length
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec

Family: TypeAlias = Literal["bert", "roberta", "mpnet", "distilbert"]
Activation: TypeAlias = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "silu"]
PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer encoder of a known family, by the numbers of its config.json.

    `family` is the layout of its tensors: XLM-R and CamemBERT are "roberta", ELECTRA is "bert". `prefix` is what may
    stand before each tensor's name. `position_offset`: the first real token's row in the position table.
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
        """The longest input in tokens that the position table can hold."""
        return self.max_positions - self.position_offset


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Token vectors to one vector; several modes are concatenated in this order."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True


class Dense(msgspec.Struct, frozen=True, kw_only=True, tag="dense"):
    """`activation(x @ weight.T + bias)`; `path` is the module's folder, where its safetensors lie.

    `residual`: x is added to that, through a matrix of its own where the sizes differ. `file`: the weights are those of
    this safetensors file; `stem` stands before the names `weight` and `bias` in it.
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
        """What tells the layer's weights from others in a graph."""
        return self.path or self.file or self.stem.rstrip(".")


class LayerNorm(msgspec.Struct, frozen=True, kw_only=True, tag="layer_norm"):
    path: str
    dimension: int


class Normalize(msgspec.Struct, frozen=True, kw_only=True, tag="normalize"):
    """x / max(|x|, 1e-12)."""


class Truncate(msgspec.Struct, frozen=True, kw_only=True, tag="truncate"):
    """The first `dimension` numbers alone: what a Matryoshka model keeps of a vector."""

    dimension: int


AfterPooling: TypeAlias = Dense | LayerNorm | Normalize | Truncate


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A static model's vectors, one a token id: `tensor` float [stored, width] in the safetensors of `path`.

    `mapping`: the tensor that tells an id's row (""; the id is the row); `weights`: the one of a factor for each id.
    `ids`: how many ids there are. `dropped`: ids that count for nothing.
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
    """Weights over the vocabulary from a masked language model's logits: log(1 + relu(logit)), for "log1p_relu" the
    logarithm twice, of the largest over the tokens or their sum. `tied`: the last layer is the word embeddings, where
    no other is in the weights."""

    strategy: Literal["max", "sum"] = "max"
    activation: Literal["relu", "log1p_relu"] = "relu"
    tied: bool = True


class TokenWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A weight for each token read, by `layer` over its vector; `skipped` ids have none (bge-m3)."""

    layer: Dense
    skipped: tuple[int, ...]


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of late interaction: `layers` over each token's vector, then unit length. `spec`: how they are read.
    `query_length`, `document_length`: where that states them, None where it does not."""

    layers: tuple[Dense, ...]
    spec: MultiSpec
    query_length: Length | None = None
    document_length: Length | None = None


class Classifier(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence classifier's head: `activation(first token @ dense)`, then `out`, one logit for each label of `spec`.

    `dense` and `out` are the names of two linear layers in the weights, beside or inside the encoder. `segments`: the
    encoder is told which text a token is of (token_type_ids). Without an `Encoder` only `spec` means anything.
    """

    spec: ScoreSpec
    dense: str = ""
    out: str = ""
    activation: Activation = "tanh"
    segments: bool = False


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """All that a text embedding model's files promise.

    `encoder_path` is the folder of config.json, weights and tokenizer inside the model's folder ("" for its root).
    `encoder` is None when only a shipped ONNX graph can run the model. `modules` follow the pooling, in order.
    `max_tokens` counts special tokens; `max_tokens_at` is the file and the key that say it. `vocab_size` is 0 where no
    file states it. A model with a `classifier` scores texts and does not embed them: `pooling` and `modules` mean
    nothing then, and `dimension` is 0. A `table` stands in the encoder's place. With `splade`, and with `late` of a
    model that is not pooled, `dimension` is 0 too; beside a dense vector (bge-m3) there may be `token_weights` and
    `late`.
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
        """The sparse vectors that it gives, None for none."""
        if self.splade is not None:
            return SparseSpec()
        if self.token_weights is not None:
            return SparseSpec(output="token_weights", per="token", skipped=self.token_weights.skipped)
        return None

    @property
    def ends_normalized(self) -> bool:
        return bool(self.modules) and isinstance(self.modules[-1], Normalize)

    def file(self, name: str) -> str:
        """The path of a file that lies beside config.json, inside the model's folder."""
        return f"{self.encoder_path}/{name}" if self.encoder_path else name
