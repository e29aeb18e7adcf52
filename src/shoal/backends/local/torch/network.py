"""Runs a model's folder as a network on a device: named arrays in, named tensors out."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.backends.local.errors import shorten_message
from shoal.backends.local.torch.folder import find_parts
from shoal.backends.local.torch.heads import Heads, Tensor
from shoal.core.protocols import Tensors
from shoal.errors import ModelFileError
from shoal.specs import TextSpec
from shoal.types import Array

Model: TypeAlias = Any
"""A transformers.PreTrainedModel; transformers is no dependency of the type checker."""

DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Maps Shoal's precision names to torch's."""

PRECISIONS = {name: precision for precision, name in DTYPES.items()}
IDS = "input_ids"
MASK = "attention_mask"
_INPUT_NAMES = (IDS, "token_type_ids", "position_ids")
_ENCODER_DECODERS = ("t5", "mt5", "umt5")
"""Encoder-decoder architectures of which embedders have only the encoder."""

_POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""Names of position tables in transformers."""


_loading = threading.RLock()
"""Serializes loading: transformers imports an architecture on first use, and sets the default dtype and the
initializers of the whole process while it builds a model."""


class BatchCancelled(RuntimeError):
    """A batch was stopped halfway because no request waits for it any more."""


class Network:
    """A loaded model with its heads. `run` may be called from several threads."""

    def __init__(self, folder: Path, spec: TextSpec, precision: str, device: str) -> None:
        """Load the model. Raises ModelFileError if transformers cannot load it or weights are missing."""
        self.precision = precision
        self.device = device
        self._spec = spec
        self._model = _load(folder, spec, precision).to(device).eval()
        self._heads = Heads(folder, spec, device)
        self._answers = _answer_row(self._model, find_parts(spec).answers)
        self._input_names = set(inspect.signature(self._model.forward).parameters)
        self._bounds = _bounds(self._model)
        self.positions = _positions(self._model)
        self._thread_state = threading.local()
        for layer in _layers(self._model):
            layer.register_forward_pre_hook(self._check_cancelled)

    @property
    def attention(self) -> str:
        """The attention implementation that transformers chose."""
        return str(getattr(self._model.config, "_attn_implementation", "") or "own")

    def check(self, feeds: Tensors) -> None:
        """Raise ValueError for numbers outside the model's tables: on a GPU they would break all later work."""
        for name, size in self._bounds.items():
            if name in feeds and (feeds[name].min() < 0 or feeds[name].max() >= size):
                raise ValueError(
                    f"{name} must be between 0 and {size - 1} (got {feeds[name].min()} to {feeds[name].max()})"
                )
        length = feeds["input_ids"].shape[1]
        if self.positions and length > self.positions:
            raise ValueError(f"{length} tokens exceed the model's {self.positions} positions")

    def run(self, feeds: Tensors, outputs: Sequence[str], stop: threading.Event) -> dict[str, Tensor]:
        """Return the outputs as f32 tensors on the device. On a GPU they may still be in progress.

        Raises BatchCancelled soon after `stop` is set, and whatever torch raises.
        """
        import torch

        arrays = self.host_arrays(feeds)
        if arrays[MASK].all():
            del arrays[MASK]
        with torch.inference_mode():
            return self.compute({name: self._to_device(array) for name, array in arrays.items()}, outputs, stop)

    def host_arrays(self, feeds: Tensors) -> dict[str, Array]:
        """Return the arrays that `compute` takes, int64 [b, l]: the encoder's inputs, the masks of the heads, and the
        encoder's mask, which `compute` may go without if it is full."""
        arrays = {name: feeds[name] for name in _INPUT_NAMES if name in feeds and name in self._input_names}
        arrays["mask"] = feeds[MASK]
        if "pooling_mask" in feeds:
            arrays["pooling_mask"] = feeds["pooling_mask"]
        arrays[MASK] = _fill_empty_rows(feeds[MASK])
        return arrays

    def compute(self, placed: Mapping[str, Tensor], outputs: Sequence[str], stop: threading.Event) -> dict[str, Tensor]:
        """As `run`, from tensors on the device, in torch's inference mode."""
        self._thread_state.stop = stop
        masks = placed["mask"], placed.get("pooling_mask", placed["mask"])
        model = self._model if self._answers is None else self._model.base_model
        answer = model(**{name: placed[name] for name in (*_INPUT_NAMES, MASK) if name in placed})
        return self._read_outputs(answer, masks, set(outputs))

    def kept_addresses(self) -> tuple[int, ...]:
        """Return where all tensors are that the model's modules keep beside their parameters."""
        import torch

        kept = [value for part in self._model.modules() for value in (*vars(part).values(), *part._buffers.values())]
        return tuple(value.data_ptr() for value in kept if isinstance(value, torch.Tensor))

    def free(self) -> None:
        """Release the weights at once: a model has reference cycles, which would keep them until the next garbage
        collection."""
        import torch

        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._heads = None  # type: ignore[assignment]
        self._answers = None
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _read_outputs(self, answer: Any, masks: tuple[Tensor, Tensor], outputs: set[str]) -> dict[str, Tensor]:
        spec = self._spec
        if spec.score is not None and self._answers is not None:
            last = masks[0].cumsum(1).argmax(1)
            read = answer.last_hidden_state.gather(1, last[:, None, None].expand(-1, 1, len(self._answers)))[:, 0]
            return {spec.score.output: read.float() @ self._answers[:, None]}
        if spec.score is not None:
            return {spec.score.output: answer.logits.float()}
        if spec.sparse is not None and spec.sparse.per == "vocabulary":
            return {spec.sparse.output: self._heads.splade_weights(answer.logits, masks[0])}
        return self._heads.compute(answer.last_hidden_state, *masks, outputs)

    def _to_device(self, array: Any) -> Tensor:
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _check_cancelled(self, *_: Any) -> None:
        stop = getattr(self._thread_state, "stop", None)
        if stop is not None and stop.is_set():
            raise BatchCancelled("no request waits for this batch any more")


def _answer_row(model: Model, answers: Sequence[int]) -> Tensor | None:
    """Return the vector whose product with a token's is the score of a language model: the row of its last layer for
    the first of the answers, minus that for the second if there is one. None for other models."""
    if not answers:
        return None
    rows = model.get_output_embeddings().weight[list(answers)].detach().float()
    row: Tensor = rows[0] if len(answers) == 1 else rows[0] - rows[1]
    return row


def published_precision(folder: Path, spec: TextSpec) -> str:
    """Return the precision of the weights according to the model's config.json. Raises ModelFileError."""
    config = _config(folder / find_parts(spec).encoder)
    return PRECISIONS.get(str(config.dtype).rpartition(".")[2], "f32") if config.dtype is not None else "f32"


def _config(folder: Path) -> Any:
    with _loading:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the model classes of transformers raise errors of any type
            raise _load_error(error) from error
    if getattr(config, "auto_map", None):
        raise ModelFileError(
            "the model needs its own code, which Shoal never runs; use one whose architecture transformers supports",
            file="config.json",
            key="auto_map",
        )
    return config


def _load(folder: Path, spec: TextSpec, precision: str) -> Model:
    with _loading:
        return _load_locked(folder, spec, precision)


def _load_locked(folder: Path, spec: TextSpec, precision: str) -> Model:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings are errors here
    place = folder / find_parts(spec).encoder
    config = _config(place)
    optional = ""
    if spec.score is not None:
        answering = bool(find_parts(spec).answers)
        kind = transformers.AutoModelForCausalLM if answering else transformers.AutoModelForSequenceClassification
    elif spec.sparse is not None and spec.sparse.per == "vocabulary":
        kind = transformers.AutoModelForMaskedLM
    else:
        halved = config.is_encoder_decoder or config.model_type in _ENCODER_DECODERS
        kind = transformers.AutoModelForTextEncoding if halved else transformers.AutoModel
        optional = "pooler."  # nothing reads the pooler here, and many embedders come without
    try:
        model, loading_info = kind.from_pretrained(
            place,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=getattr(torch, DTYPES[precision]),
            output_loading_info=True,
        )
    except Exception as error:  # the model classes of transformers raise errors of any type
        raise _load_error(error) from error
    missing = [name for name in loading_info["missing_keys"] if not optional or optional not in name]
    if missing or loading_info["mismatched_keys"]:
        wrong = sorted([*missing, *(str(key[0]) for key in loading_info["mismatched_keys"])])
        raise ModelFileError(
            f"{len(wrong)} tensors are missing or do not match the shapes in config.json; fetch the model again",
            file="model.safetensors",
            key=wrong[0],
        )
    model.config.use_cache = False
    return model


def _load_error(error: Exception) -> ModelFileError:
    return ModelFileError(
        f"transformers cannot load this model: {shorten_message(str(error)) or type(error).__name__}; use a model "
        "whose architecture transformers supports, with safetensors weights",
        file="config.json",
    )


def _layers(model: Model) -> list[Any]:
    """Return the repeated blocks of a model. A batch can be canceled between them."""
    from torch.nn import ModuleList

    return [layer for part in model.modules() if isinstance(part, ModuleList) for layer in part]


def _bounds(model: Model) -> dict[str, int]:
    """Map input names to the number of rows in the table that their values index."""
    bounds = {"input_ids": int(model.get_input_embeddings().num_embeddings)}
    part: Any
    for name, part in model.named_modules():
        if name.endswith("token_type_embeddings") and hasattr(part, "num_embeddings"):
            bounds["token_type_ids"] = int(part.num_embeddings)
    return bounds


def _positions(model: Model) -> int:
    """Return the number of positions in the position table, or 0 without one. RoBERTa's start after its padding row."""
    part: Any
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in _POSITIONS and hasattr(part, "num_embeddings"):
            padding = part.padding_idx
            return int(part.num_embeddings) - (padding + 1 if padding is not None else 0)
    return 0


def _fill_empty_rows(mask: Any) -> Any:
    """Return the mask with the first token kept in rows that keep none, because attention to nothing is NaN."""
    empty = ~mask.any(axis=1)
    if not empty.any():
        return mask
    mask = mask.copy()
    mask[empty, 0] = 1
    return mask
