"""Nomic's text encoder with experts in torch: the published models run code from the model hub, and transformers has
only the encoder without experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(NamedTuple):
    """`every`: every n-th layer has experts, from the second on."""

    words: int
    hidden: int = 32
    heads: int = 4
    inner: int = 48
    layers: int = 4
    every: int = 2
    experts: int = 5
    top: int = 2
    theta: float = 10_000.0

    def config(self, **others: Any) -> dict[str, Any]:
        """Return the keys of config.json."""
        return {
            "model_type": "nomic_bert",
            "architectures": ["NomicBertModel"],
            "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
            "vocab_size": self.words,
            "type_vocab_size": 1,
            "n_embd": self.hidden,
            "n_head": self.heads,
            "n_inner": self.inner,
            "n_layer": self.layers,
            "n_positions": 128,
            "max_trained_positions": 128,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu",
            "rotary_emb_base": self.theta,
            "rotary_emb_fraction": 1.0,
            "qkv_proj_bias": True,
            "mlp_fc1_bias": True,
            "mlp_fc2_bias": True,
            "moe_every_n_layers": self.every,
            "moe_top_k": self.top,
            "num_experts": self.experts,
            "moe_normalize_expert_weights": False,
            **others,
        }


class NomicExperts(nn.Module):  # type: ignore[misc]
    """The encoder; its parameters have the published names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(sizes.words, sizes.hidden),
                "token_type_embeddings": nn.Embedding(1, sizes.hidden),
            }
        )
        self.emb_ln = nn.LayerNorm(sizes.hidden, eps=1e-5)
        layers = [_Layer(sizes, experts=index % sizes.every == 1) for index in range(sizes.layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the token vectors [b, l, hidden]."""
        words, types = self.embeddings["word_embeddings"], self.embeddings["token_type_embeddings"]
        x = self.emb_ln(words(input_ids) + types(torch.zeros_like(input_ids)))
        kept = attention_mask[:, None, None, :].bool()
        for layer in self.encoder["layers"]:
            x = layer(x, kept)
        return x


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: Sizes, *, experts: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.attn = nn.ModuleDict(
            {
                "Wqkv": nn.Linear(sizes.hidden, 3 * sizes.hidden),
                "out_proj": nn.Linear(sizes.hidden, sizes.hidden),
            }
        )
        self.mlp = _Experts(sizes) if experts else _FeedForward(sizes)
        self.norm1, self.norm2 = nn.LayerNorm(sizes.hidden, eps=1e-5), nn.LayerNorm(sizes.hidden, eps=1e-5)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = self.norm1(x + self._attend(x, kept))
        return self.norm2(x + self.mlp(x))

    def _attend(self, x: Tensor, kept: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.attn["Wqkv"](x).view(batch, length, 3, self.sizes.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, self.sizes.theta) for part in parts[:2])
        mixed = functional.scaled_dot_product_attention(query, key, parts[2], attn_mask=kept)
        return self.attn["out_proj"](mixed.transpose(1, 2).reshape(batch, length, hidden))


class _FeedForward(nn.Module):  # type: ignore[misc]
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes.hidden, sizes.inner), nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class _Experts(nn.Module):  # type: ignore[misc]
    """Runs every token through every expert, and drops the results of all but the best."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = nn.ModuleDict({"layer": nn.Linear(sizes.hidden, sizes.experts, bias=False)})
        matrices = {name: nn.Parameter(torch.empty(sizes.experts * sizes.inner, sizes.hidden)) for name in ("w1", "w2")}
        for matrix in matrices.values():
            nn.init.normal_(matrix, std=0.3)
        self.experts = nn.ModuleDict({"mlp": nn.ParameterDict(matrices)})
        self.experts.bias = nn.Parameter(torch.zeros(sizes.hidden))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router["layer"](x).softmax(-1)
        least = weights.topk(self.sizes.top).values[..., -1:]
        shape = (self.sizes.experts, self.sizes.inner, self.sizes.hidden)
        up, down = (self.experts["mlp"][name].view(shape) for name in ("w1", "w2"))
        inner = functional.gelu(torch.einsum("blh,eih->blei", x, up))
        results = torch.einsum("blei,eih->bleh", inner, down)
        return (results * (weights * (weights >= least))[..., None]).sum(2) + self.experts.bias


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate [b, heads, l, size]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
