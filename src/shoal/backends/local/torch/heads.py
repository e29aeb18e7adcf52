"""Computes a TextSpec's outputs from token vectors, on the device in f32: pooling, modules, sparse and multi vectors.

Token vectors may have 16 bits. They are summed in f32 and never copied to f32 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.backends.local.torch.folder import TRUNCATE, find_parts, find_weights
from shoal.errors import ModelFileError
from shoal.specs import LayerSpec, TextSpec

Tensor: TypeAlias = Any
"""A torch.Tensor; PyTorch is no dependency of the type checker."""

NORM_EPS = 1e-5
"""The default of torch.nn.LayerNorm, which sentence-transformers' LayerNorm module keeps."""

SHORTEST = 1e-12
"""Minimum length that a vector is divided by, as in torch.nn.functional.normalize."""


class Linear:
    """Computes `activation(x @ weight.T + bias)` in f32, plus a residual: nothing if `residual` is None, x @ residual.T
    for a matrix, and x for True."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | Literal[True] | None = None
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._residual = residual
        self._activate = get_activation(activation)

    def __call__(self, x: Tensor) -> Tensor:
        from torch.nn import functional

        x = x.float()
        made = self._activate(functional.linear(x, self._weight, self._bias))
        if self._residual is None:
            return made
        return made + (x if self._residual is True else functional.linear(x, self._residual))


class LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.layer_norm(x, x.shape[-1:], self._weight, self._bias, NORM_EPS)


def normalize(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.normalize(x, dim=-1, eps=SHORTEST)


Module: TypeAlias = Callable[[Tensor], Tensor]


class Heads:
    """The modules after a model's encoder, with the weights on `device`."""

    def __init__(self, folder: Path, spec: TextSpec, device: str) -> None:
        """Load the modules. Raises ModelFileError for weights that are missing, unreadable or of other sizes than in
        the spec."""
        parts = find_parts(spec)
        self._spec = spec
        self._modes = spec.pooling.split("+")
        self._after = [_load_module(folder, step, device) for step in parts.after] if spec.dimension else []
        self._splade = parts.splade
        self._sparse = None if parts.token_weights is None else _load_module(folder, parts.token_weights, device)
        self._multi: list[Module] = []
        if spec.multi is not None:
            self._multi = [*(_load_module(folder, step, device) for step in parts.late), normalize]

    def compute(self, tokens: Tensor, mask: Tensor, pooling_mask: Tensor, outputs: set[str]) -> dict[str, Tensor]:
        """Return the `outputs`, f32, of token vectors [b, l, width]. The masks are integers [b, l]."""
        spec = self._spec
        found: dict[str, Tensor] = {}
        if outputs & {spec.sentence_embedding, spec.pooled}:
            found |= self._dense(tokens, pooling_mask)
        if spec.sparse is not None and spec.sparse.output in outputs and self._sparse is not None:
            found[spec.sparse.output] = self._sparse(tokens).squeeze(-1) * mask
        if spec.multi is not None and spec.multi.output in outputs:
            vectors = tokens
            for module in self._multi:
                vectors = module(vectors)
            found[spec.multi.output] = vectors.float()
        if spec.tokens and spec.tokens in outputs:
            found[spec.tokens] = tokens.float()
        return found

    def splade_weights(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return SPLADE's weights, f32 [b, vocabulary], of logits [b, l, vocabulary], which are overwritten.

        The logarithm is monotonic, so for the maximum it is taken of the largest logit only.
        """
        strategy, activation = self._splade
        left_out = (mask == 0).unsqueeze(-1)
        if strategy == "max":
            made = logits.masked_fill_(left_out, float("-inf")).amax(1).float().relu().log1p()
            return made.log1p() if activation == "log1p_relu" else made
        made = logits.masked_fill_(left_out, 0.0).float().relu_().log1p_()
        return (made.log1p_() if activation == "log1p_relu" else made).sum(1)

    def _dense(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        import torch

        parts = [POOLINGS[mode](tokens, mask) for mode in self._modes]
        vectors = before = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        for module in self._after:
            before, vectors = vectors, module(vectors)
        pooled = before if self._spec.ends_normalized else vectors.clone()
        return {self._spec.pooled: pooled} | {self._spec.sentence_embedding: vectors}


def _cut(dimension: int) -> Module:
    return lambda x: x[..., :dimension]


def _first(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the first token that the mask keeps, or token 0 if it keeps none."""
    return _pick(tokens, (mask > 0).int().argmax(1))


def _last(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the last token that the mask keeps, or zeros if it keeps none."""
    kept = (mask > 0).int()
    last = mask.shape[1] - 1 - kept.flip(1).argmax(1)
    return _pick(tokens, last).masked_fill(kept.sum(1, keepdim=True) == 0, 0.0)


def _pick(tokens: Tensor, at: Tensor) -> Tensor:
    import torch

    return tokens[torch.arange(len(tokens), device=tokens.device), at].float()


def _max(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each dimension, or zeros if the mask keeps no token."""
    left_out = (mask == 0).unsqueeze(-1)
    highest = tokens.masked_fill(left_out, float("-inf")).amax(1).float()
    return highest.masked_fill(mask.sum(1, keepdim=True) == 0, 0.0)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    return _sum(tokens, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def _mean_sqrt_len(tokens: Tensor, mask: Tensor) -> Tensor:
    return _sum(tokens, mask) / mask.sum(1, keepdim=True).clamp(min=1).float().sqrt()


def _weighted_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Average with weights 1, 2, 3, ... by position. A prompt that is left out still counts in the positions."""
    import torch

    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    weighted = _zero_masked(tokens, mask).float() * weights.unsqueeze(-1)
    return weighted.sum(1) / weights.sum(1, keepdim=True).clamp(min=1)


def _sum(tokens: Tensor, mask: Tensor) -> Tensor:
    import torch

    return _zero_masked(tokens, mask).sum(1, dtype=torch.float32)


def _zero_masked(tokens: Tensor, mask: Tensor) -> Tensor:
    """Set masked tokens to zero, even if they are NaN."""
    return tokens.masked_fill((mask == 0).unsqueeze(-1), 0.0)


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""Maps a pooling mode to its function: f32 [b, width] from token vectors [b, l, width] and an integer mask [b, l]."""


def get_activation(name: str) -> Module:
    """Return an activation by its name in `TextSpec.modules`. Raises ModelFileError for an unknown one."""
    import torch
    from torch.nn import functional

    known: dict[str, Module] = {
        "identity": lambda x: x,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "silu": functional.silu,
    }
    if name not in known:
        raise ModelFileError(f"unknown activation {name!r}; Shoal supports {', '.join(known)}", file="modules.json")
    return known[name]


def _load_module(folder: Path, step: LayerSpec, device: str) -> Module:
    if step.kind == "normalize":
        return normalize
    if step.kind == TRUNCATE:
        return _cut(step.dimension)
    into, out = step.takes, step.dimension
    if step.kind == "layer_norm":
        return LayerNorm(
            *(_load_tensor(folder, step, f"{step.stem}{name}", (out,), device) for name in ("weight", "bias"))
        )
    weight = _load_tensor(folder, step, f"{step.stem}weight", (out, into), device)
    bias = _load_tensor(folder, step, f"{step.stem}bias", (out,), device) if step.bias else None
    added: Tensor | Literal[True] | None = None
    if step.residual:
        added = True if into == out else _load_tensor(folder, step, "residual.weight", (out, into), device)
    return Linear(weight, bias, step.activation, added)


def _load_tensor(folder: Path, step: LayerSpec, tensor: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Load one tensor of a module as f32 onto the device. Raises ModelFileError if missing or of another shape."""
    from safetensors import SafetensorError, safe_open

    place = folder / step.file if step.file else find_weights(folder, step.path, tensor)
    name = place.relative_to(folder).as_posix()
    try:
        with safe_open(place, framework="pt") as file:
            found = file.get_tensor(tensor) if tensor in file.keys() else None  # noqa: SIM118 - it is not a dictionary
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot be read ({error}); fetch the model again", file=name) from None
    if found is None:
        raise ModelFileError("is missing; fetch the model again", file=name, key=tensor)
    if tuple(found.shape) != shape:
        raise ModelFileError(
            f"has shape {list(found.shape)}, but the model was stored with {list(shape)}; pull the model again",
            file=name,
            key=tensor,
        )
    return found.float().to(device)
