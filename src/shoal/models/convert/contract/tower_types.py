"""The checked content of a dual encoder's files: input of graph building and of the numpy reference."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from shoal.models.convert.contract.architecture import Activation, Attention, FeedForward, Layer, Norm, Norms, Shape
from shoal.models.convert.contract.tower_tokenizer import TowerTokenizer
from shoal.specs import ImageSpec, TextSpec

TEXT_EMBEDS = "text_embeds"
IMAGE_EMBEDS = "image_embeds"
PIXELS = "pixel_values"

TowerFamily: TypeAlias = Literal["clip", "siglip"]
Layout: TypeAlias = Literal["transformers", "open_clip"]
"""The library whose names weights and settings have."""

_ATTENTION = Attention(
    query="self_attn.q_proj", key="self_attn.k_proj", value="self_attn.v_proj", out="self_attn.out_proj"
)
_MLP = FeedForward(up="mlp.fc1", down="mlp.fc2")
PROBE_MLP = FeedForward(up="head.mlp.fc1", down="head.mlp.fc2")
"""Of SigLIP's pooling head."""
_NORMS = Norms(before_attention="layer_norm1", before_feed_forward="layer_norm2")


class _Tower(msgspec.Struct, frozen=True, kw_only=True):
    hidden: int
    layers: int
    heads: int
    intermediate: int
    norm_eps: float
    activation: Activation

    @property
    def shape(self) -> Shape:
        size = self.hidden // self.heads
        return Shape(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            head_size=size,
            intermediate=self.intermediate,
            activation=self.activation,
            norm=Norm(eps=self.norm_eps),
            scale=size**-0.5,
        )

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """The layers, with the norms before each part."""
        return tuple(
            Layer(stem=f"encoder.layers.{layer}.", attention=_ATTENTION, feed_forward=_MLP, norms=_NORMS)
            for layer in range(self.layers)
        )


class TextTower(_Tower, frozen=True, kw_only=True):
    """A text tower's numbers. `eos_id`: a text's vector is taken at the first token with this id; None: at the first of
    the highest id in the text (CLIP's older configurations). SigLIP takes the last position and needs none."""

    vocab_size: int
    max_positions: int
    eos_id: int | None = None


class ImageTower(_Tower, frozen=True, kw_only=True):
    """An image tower's numbers. An image of `size` pixels a side is cut into squares of `patch`; the remainder at its
    right and lower edge is ignored."""

    size: int
    patch: int

    @property
    def patches(self) -> int:
        side = self.size // self.patch
        return side * side


class Towers(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the files of a dual encoder specify. `dimension` is that of both towers' vectors. `text_spec` and
    `image_spec` are those of the two graphs, whose vectors are not normalized. `path`: where the files are in the
    model's folder ("": at its top)."""

    family: TowerFamily
    text: TextTower
    image: ImageTower
    dimension: int
    text_spec: TextSpec
    image_spec: ImageSpec
    layout: Layout = "transformers"
    path: str = ""


def text_spec(tokenizer: TowerTokenizer, family: TowerFamily, text: TextTower, dimension: int) -> TextSpec:
    """Build the TextSpec of a text tower and its tokenizer."""
    pad_id = tokenizer.pad_id
    if family == "clip":
        # Nothing after the pooled token is seen, so any padding works that does not look like that token.
        pad_id = 0 if text.eos_id != 0 else 1
    return TextSpec(
        tokenizer=tokenizer.file,
        inputs=("input_ids",),
        dimension=dimension,
        max_tokens=tokenizer.max_tokens,
        pad_id=pad_id,
        vocab_size=text.vocab_size,
        lower_case=tokenizer.lower_case,
        pooling="eos" if family == "clip" else "last",
        sentence_embedding=TEXT_EMBEDS,
        pooled=TEXT_EMBEDS,
        ends_normalized=False,
        pad_to=tokenizer.max_tokens if family == "siglip" else 0,
        cleaning=tokenizer.cleaning,
    )
