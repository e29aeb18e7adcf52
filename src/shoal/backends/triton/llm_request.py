"""Builds the requests of one generation to a language model on Triton: pure. Sources: as in `llm_schema`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from shoal.backends.triton.llm_schema import GUIDE, GUIDE_TYPE, IDS, LENGTHS, SAMPLING, LlmSchema
from shoal.backends.triton.tensors import Tensor
from shoal.core.protocols import Prompt
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, InvalidValue
from shoal.kserve import codec
from shoal.kserve.protocol_pb2 import ModelInferRequest
from shoal.types import Array, Guide, Sampling

_CHOICES = json_decoder(list[str])

Adapter = str | int

DEFAULT_MAX_TOKENS = 1024
"""Maximum tokens of an answer if the model requires a number and the request has none."""

NEUTRAL_VALUES: Mapping[str, Any] = {
    "max_tokens": DEFAULT_MAX_TOKENS,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "stop": [],
    "bad_words": [],
}
"""Values for required inputs of fields that the request does not set."""

VLLM_NAMES = {"include_stop": "include_stop_str_in_output"}
GUIDE_TYPES = {"json_object": "json", "json_schema": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}
"""Kinds of guides to TensorRT-LLM's names."""

VLLM_GUIDE_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Kinds of guides to fields of vLLM's StructuredOutputsParams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokenizer:
    """A model's tokenizer: `encode` without special tokens, `piece` the text of one token, `ends` the tokens that end
    an answer, the usual one first."""

    encode: Callable[[str], Sequence[int]]
    piece: Callable[[int], str]
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The content of one generation request. `id` is unique, so that the generation can be canceled by it."""

    id: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    adapter: str = ""


class RequestBuilder:
    """Builds the requests to one model. `adapters` maps the LoRA names of clients to the model's.

    `words` is required if the model reads token ids, except to build only cancellations. Raises ConfigError for
    adapters that the model cannot take.
    """

    def __init__(
        self,
        schema: LlmSchema,
        model: str,
        version: str = "",
        *,
        words: ModelTokenizer | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self._schema = schema
        self._model = model
        self._version = version
        self._vocabulary = words
        self._adapters = dict(adapters or {})
        self._check_adapters()

    def build_generation(self, generation: GenerationRequest) -> ModelInferRequest:
        """Build the request. Raises InvalidValue for unsupported options, InputRejected for a number out of range."""
        schema, sampling = self._schema, generation.sampling
        request = self._new_request(generation.id)
        self._put_prompt(request, generation.prompt)
        if schema.streaming:
            self._put(request, schema.streaming, generation.stream and schema.decoupled)
        if schema.exclude:
            self._put(request, schema.exclude, True)
        for name in schema.flags:
            self._put(request, name, True)
        if schema.family == "vllm":
            self._put_vllm(request, generation)
            return request
        for name, value in self._sampling_values(sampling).items():
            self._put_field(request, name, value)
        if schema.family == "tokens":
            self._put_stop_tokens(request, sampling)
        if sampling.logprobs is not None and "logprobs" in schema.parameters:
            if sampling.logprobs:
                raise InvalidValue(
                    "this model returns only the probability of the chosen token: leave out top_logprobs",
                    param="top_logprobs",
                )
            self._put(request, "return_log_probs", True)
        if sampling.guide is not None and "guide" in schema.parameters:
            self._put_guide(request, sampling.guide)
        if generation.adapter:
            self._put_adapter(request, generation.adapter)
        return request

    def build_cancellation(self, id: str) -> ModelInferRequest | None:
        """Build the request that ends the generation `id`; None if the model takes no such request."""
        schema = self._schema
        if not schema.cancel:
            return None
        request = self._new_request(id)
        self._put_prompt(request, Prompt(text="", ids=(0,)), length=0)
        for name, own in schema.fields.items():
            if not schema.inputs[own].optional:
                self._put_field(request, name, 0 if name == "max_tokens" else NEUTRAL_VALUES[name])
        self._put(request, schema.cancel, True)
        return request

    def _new_request(self, id: str) -> ModelInferRequest:
        return ModelInferRequest(model_name=self._model, model_version=self._version, id=id)

    def _put_prompt(self, request: ModelInferRequest, prompt: Prompt, *, length: int | None = None) -> None:
        schema = self._schema
        if schema.prompt != IDS:
            self._put(request, schema.prompt, prompt.text)
            return
        if prompt.ids is None:
            raise InvalidValue("this model reads token ids, but the prompt has none: send text", param="prompt")
        self._put(request, IDS, prompt.ids)
        if LENGTHS in schema.inputs:
            self._put(request, LENGTHS, len(prompt.ids) if length is None else length)

    def _sampling_values(self, sampling: Sampling) -> dict[str, Any]:
        """Return the values of the sampling inputs: the fields that are set, and those that the model requires."""
        schema = self._schema
        values: dict[str, Any] = {}
        for name, own in schema.fields.items():
            value = getattr(sampling, name)
            if value is not None and value != []:
                values[name] = value
            elif not schema.inputs[own].optional:
                values[name] = NEUTRAL_VALUES[name]
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if schema.family in ("trtllm", "tokens"):
            self._set_sampling_defaults(values, sampling)
        return values

    def _set_sampling_defaults(self, values: dict[str, Any], sampling: Sampling) -> None:
        """Set what TensorRT-LLM needs to sample: without top_k or top_p it takes the likeliest token at any
        temperature, and not every version accepts temperature 0, which means the same."""
        has, inputs = self._schema.fields, self._schema.inputs
        if sampling.temperature == 0 and "top_k" in has:
            values["top_k"] = 1
            for name in ("temperature", "top_p"):
                if name in has and inputs[has[name]].optional:
                    values.pop(name, None)
        elif (sampling.temperature is not None or sampling.top_p is not None) and not values.get("top_k"):
            for name in {"top_k", "top_p"} & has.keys():
                values.setdefault(name, NEUTRAL_VALUES[name])
        if sampling.logprobs is not None and "temperature" in has and not values.keys() & {"temperature", "top_k"}:
            values["temperature"] = 1.0  # without any sampling input it returns no probabilities

    def _put_field(self, request: ModelInferRequest, name: str, value: Any) -> None:
        tensor = self._schema.inputs[self._schema.fields[name]]
        if name in ("stop", "bad_words"):
            self._put_words(request, tensor, value, name)
        elif name == "seed":
            self._put(request, tensor.name, _wrap_seed(value, tensor.datatype))
        else:
            self._put(request, tensor.name, value)

    def _put_words(self, request: ModelInferRequest, tensor: Tensor, texts: Sequence[str], name: str) -> None:
        if tensor.datatype == "INT32":
            if name == "stop" and "stop_token_ids" in self._schema.parameters:
                return  # sent with the end tokens: see _put_stop_tokens
            self._put_list(request, tensor, self._encode_texts(texts))
            return
        most = tensor.dims[-1] if tensor.dims else 1
        if 0 < most < len(texts):
            if name != "stop":  # Shoal cuts the answer at stop strings anyway
                raise InvalidValue(f"this model takes at most {most} {name} (got {len(texts)})", param=name)
            texts = texts[:most]
        self._put(request, tensor.name, list(texts) or [""])

    def _encode_texts(self, texts: Iterable[str]) -> list[Sequence[int]]:
        assert self._vocabulary is not None, "a model with word lists reads token ids"
        return [ids for text in texts if (ids := self._vocabulary.encode(text))]

    def _put_list(self, request: ModelInferRequest, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        """Put a word list: row 0 the tokens of all words, row 1 the end of each word in it, padded with -1."""
        if not words and tensor.optional:
            return
        flat = [id for word in words for id in word] or [0]
        ends = list(accumulate(len(word) for word in words))
        self._put(request, tensor.name, [flat, ends + [-1] * (len(flat) - len(ends))])

    def _put_stop_tokens(self, request: ModelInferRequest, sampling: Sampling) -> None:
        """Put all tokens that end an answer, and the stop texts: the engine has no end tokens of its own."""
        schema, words = self._schema, self._vocabulary
        ends = () if words is None or sampling.ignore_eos else words.ends
        if ends and "end_id" in schema.inputs:
            self._put(request, "end_id", ends[0])
            if "pad_id" in schema.inputs:
                self._put(request, "pad_id", ends[0])
            ends = ends[1:]
        if "stop_token_ids" in schema.parameters:
            alone = [[id] for id in (*ends, *sampling.stop_token_ids)]
            stops = [*self._encode_texts(sampling.stop), *alone]
            self._put_list(request, schema.inputs[schema.fields["stop"]], stops)

    def _put_guide(self, request: ModelInferRequest, guide: Guide) -> None:
        kind, value = GUIDE_TYPES.get(guide.kind), guide.value
        if guide.kind == "choice":
            kind, value = "regex", "|".join(f"({re.escape(text)})" for text in _choices(guide))
        if kind is None:
            raise InvalidValue(f"this model does not support guided decoding with a {guide.kind}", param=guide.field)
        self._put(request, GUIDE_TYPE, kind)
        if guide.kind != "json_object":
            self._put(request, GUIDE, value)

    def _put_adapter(self, request: ModelInferRequest, adapter: str) -> None:
        schema, value = self._schema, self._adapters[adapter]
        if schema.family != "llmapi" or "lora_path" not in schema.inputs:
            self._put(request, schema.adapter, value)
            return
        self._put(request, "lora_name", adapter)
        self._put(request, "lora_path", value)
        if "lora_id" in schema.inputs:
            self._put(request, "lora_id", _stable_id(f"{adapter} {value}"))

    def _put_vllm(self, request: ModelInferRequest, generation: GenerationRequest) -> None:
        schema, sampling = self._schema, generation.sampling
        parameters: dict[str, Any] = {}
        for name in sorted(schema.parameters - {"guide"}):
            value = getattr(sampling, name)
            if value is not None and value != []:
                parameters[VLLM_NAMES.get(name, name)] = value
        if sampling.guide is not None and schema.guide:
            parameters[schema.guide] = json.dumps(_to_structured_outputs(sampling.guide))  # it reads JSON within JSON
        if generation.adapter:
            parameters["lora_name"] = self._adapters[generation.adapter]
        if SAMPLING in schema.inputs:
            self._put(request, SAMPLING, msgspec.json.encode(parameters))
        else:
            for name, value in parameters.items():
                codec.set_parameter(request.parameters, name, value)
        if "logprobs" in parameters:
            self._put(request, "return_logprobs", True)

    def _put(self, request: ModelInferRequest, name: str, value: Any) -> None:
        """Put one tensor, in the model's shape and datatype for it."""
        tensor = self._schema.inputs[name]
        array = _to_array(value, tensor.datatype)
        array = (
            array.reshape((1,) * (len(tensor.dims) - array.ndim) + array.shape) if tensor.dims else array.reshape(())
        )
        codec.add_input(request, name, tensor.datatype, array[None] if self._schema.batched else array)

    def _check_adapters(self) -> None:
        schema = self._schema
        if self._adapters and not schema.adapter:
            raise ConfigError(f"{self._model} does not support LoRA: leave out `adapters`, or serve a model that does")
        if schema.adapter == "lora_task_id":
            for name, value in self._adapters.items():
                if isinstance(value, str) or value < 0:
                    raise ConfigError(
                        f"{self._model} selects adapters by task id: set the adapter {name!r} to its number"
                    )
        else:
            self._adapters = {name: str(value) for name, value in self._adapters.items()}


def _to_array(value: Any, datatype: str) -> Array:
    """Return a value or list of values as an array, at least 1-D."""
    if datatype == "BYTES":
        values = value if isinstance(value, list) else [value]
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array
    kind: Any = np.bool_ if datatype == "BOOL" else None
    if isinstance(value, int) and not isinstance(value, bool):
        kind = np.uint64 if value >= 2**63 else np.int64
    array = np.atleast_1d(np.asarray(value, dtype=kind))
    return array.astype(np.float64) if datatype in ("FP16", "FP32", "FP64", "BF16") else array


def _wrap_seed(seed: int, datatype: str) -> int:
    """Map a seed into the range of its datatype, always to the same number: clients send any signed 64-bit one."""
    if datatype not in codec.DTYPES or codec.DTYPES[datatype].kind not in "iu":
        return seed
    bounds = np.iinfo(codec.DTYPES[datatype])
    size = int(bounds.max) - int(bounds.min) + 1
    return (seed - int(bounds.min)) % size + int(bounds.min)


def _to_structured_outputs(guide: Guide) -> dict[str, Any]:
    if guide.kind == "json_object":
        return {"json_object": True}
    if guide.kind == "choice":
        return {"choice": _choices(guide)}
    return {VLLM_GUIDE_FIELDS[guide.kind]: guide.value}


def _choices(guide: Guide) -> list[str]:
    try:
        return _CHOICES.decode(guide.value)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"a choice must be a list of strings: {error}", param=guide.field) from None


def _stable_id(text: str) -> int:
    """Return a positive number that does not depend on restarts and load order: servers cache adapters by it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) & 0x7FFFFFFF or 1
