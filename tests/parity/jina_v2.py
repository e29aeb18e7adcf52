"""Jina's encoders of version 2 in torch: the published models run code from the model hub. `code`: the variant for
code, which normalizes queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, EPS = 6, 1e-12
"""Six heads: their factors are those of four and two of the next longer series."""
_CODE = "jinaai/jina-bert-v2-qk-post-norm"


def config(words: int, *, code: bool, hidden: int = 36, inner: int = 48, layers: int = 3) -> dict[str, Any]:
    """Return the keys of config.json."""
    return {
        "_name_or_path": _CODE if code else "jinaai/jina-bert-implementation",
        "model_type": "bert",
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        "hidden_act": "gelu",
        "vocab_size": words,
        "type_vocab_size": 2,
        "hidden_size": hidden,
        "num_attention_heads": HEADS,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "max_position_embeddings": 128,
        "layer_norm_eps": EPS,
    }


class JinaBert(nn.Module):  # type: ignore[misc]
    """The encoder; its parameters have the published names."""

    def __init__(self, sizes: dict[str, Any], *, code: bool) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        tables = {"word_embeddings": sizes["vocab_size"], "token_type_embeddings": sizes["type_vocab_size"]}
        self.embeddings = nn.ModuleDict({name: nn.Embedding(rows, hidden) for name, rows in tables.items()})
        self.embeddings["LayerNorm"] = nn.LayerNorm(hidden, eps=EPS)
        layers = [_Layer(hidden, sizes["intermediate_size"], code) for _ in range(sizes["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the token vectors [b, l, hidden]."""
        tables = self.embeddings
        words = tables["word_embeddings"](input_ids)
        x = tables["LayerNorm"](words + tables["token_type_embeddings"](torch.zeros_like(input_ids)))
        places = torch.arange(input_ids.shape[1])
        far = (places[:, None] - places[None, :]).abs()
        factors = torch.tensor([2.0**-n for n in (2, 4, 6, 8, 1, 3)])
        bias = -factors[:, None, None] * far + torch.where(attention_mask[:, None, None, :] > 0, 0.0, -torch.inf)
        for layer in self.encoder["layer"]:
            x = layer(x, bias)
        return x


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, inner: int, code: bool) -> None:
        super().__init__()
        self.code = code
        maps = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
        output = nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "LayerNorm": nn.LayerNorm(hidden, eps=EPS)})
        self.attention = nn.ModuleDict({"self": maps, "output": output})
        wide, narrow = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
        self.mlp = nn.ModuleDict({wide: nn.Linear(hidden, 2 * inner, bias=False), narrow: nn.Linear(inner, hidden)})
        if code:
            maps["layer_norm_q"], maps["layer_norm_k"] = nn.LayerNorm(hidden, eps=EPS), nn.LayerNorm(hidden, eps=EPS)
            self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(hidden, eps=EPS), nn.LayerNorm(hidden, eps=EPS)
        else:
            self.mlp["layernorm"] = nn.LayerNorm(hidden, eps=EPS)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        output, mlp = self.attention["output"], self.mlp
        attended = output["LayerNorm"](x + output["dense"](self._attend(x, bias)))
        if not self.code:
            gate, up = mlp["gated_layers"](attended).chunk(2, -1)
            return mlp["layernorm"](attended + mlp["wo"](functional.gelu(gate) * up))
        middle = self.layer_norm_1(x + attended)
        up, gate = mlp["up_gated_layer"](middle).chunk(2, -1)
        return self.layer_norm_2(middle + mlp["down_layer"](up * functional.gelu(gate)))

    def _attend(self, x: Tensor, bias: Tensor) -> Tensor:
        maps = self.attention["self"]
        query, key, value = (maps[name](x) for name in ("query", "key", "value"))
        if self.code:
            query, key = maps["layer_norm_q"](query), maps["layer_norm_k"](key)
        parts = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value))
        return functional.scaled_dot_product_attention(*parts, attn_mask=bias).transpose(1, 2).flatten(2)
