"""What a model's files say, checked: the input of graph building, of the numpy reference and of the TextSpec."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Family: TypeAlias = Literal["bert", "roberta", "mpnet", "distilbert"]
Activation: TypeAlias = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "sigmoid", "silu"]
PoolingMode: TypeAlias = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer encoder of a known family, by the numbers of its config.json.

    `family` is the layout of its tensors: XLM-R and CamemBERT are "roberta". `prefix` is what may stand before each
    tensor's name. `position_offset`: the first real token's row in the position table.
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
    """`activation(x @ weight.T + bias)`; `path` is the module's folder, where its safetensors lie."""

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


class LayerNorm(msgspec.Struct, frozen=True, kw_only=True, tag="layer_norm"):
    path: str
    dimension: int


class Normalize(msgspec.Struct, frozen=True, kw_only=True, tag="normalize"):
    """x / max(|x|, 1e-12)."""


AfterPooling: TypeAlias = Dense | LayerNorm | Normalize


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """All that a text embedding model's files promise.

    `encoder_path` is the folder of config.json, weights and tokenizer inside the model's folder ("" for its root).
    `encoder` is None when only a shipped ONNX graph can run the model. `modules` follow the pooling, in order.
    `max_tokens` counts special tokens. `vocab_size` is 0 where no file states it.
    """

    encoder_path: str
    encoder: Encoder | None
    pooling: Pooling
    modules: tuple[AfterPooling, ...]
    dimension: int
    max_tokens: int
    pad_id: int = 0
    vocab_size: int = 0
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"

    @property
    def ends_normalized(self) -> bool:
        return bool(self.modules) and isinstance(self.modules[-1], Normalize)

    def file(self, name: str) -> str:
        """The path of a file that lies beside config.json, inside the model's folder."""
        return f"{self.encoder_path}/{name}" if self.encoder_path else name
