"""How to call a language model on Triton and what it returns, read from its ModelConfig and ModelMetadata: pure.

Sources: triton-inference-server/vllm_backend (src/model.py, src/utils), NVIDIA/TensorRT-LLM (triton_backend/all_models:
inflight_batcher_llm, gpt, llmapi), Dynamo's KServe frontend. Shoal reads a model's features from its actual
tensors, not from its name: users edit ensembles, and each release adds tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from shoal.backends.triton.tensors import Tensor, Tensors, count_instances, detect_family, newest_version, read_tensors
from shoal.kserve.protocol_pb2 import ModelConfig, ModelMetadataResponse

Family: TypeAlias = Literal["vllm", "trtllm", "tokens", "llmapi", "dynamo", "text"]
OutputMode: TypeAlias = Literal["delta", "cumulative", "ids"]

FAMILIES: Mapping[str, Family] = {
    "vLLM": "vllm",
    "TensorRT-LLM": "trtllm",
    "TensorRT-LLM, token level": "tokens",
    "TensorRT-LLM, LLM API": "llmapi",
    "Dynamo": "dynamo",
    "text_output": "text",
}
"""Results of `detect_family` to families. "trtllm": ensemble, BLS and the older `gpt` of TensorRT-LLM; "tokens": its
engine, which Shoal tokenizes for; "text": any other model that reads `text_input` and returns `text_output`."""

TEXT, IDS, OUTPUT, OUTPUT_IDS = "text_input", "input_ids", "text_output", "output_ids"
SAMPLING, LENGTHS = "sampling_parameters", "input_lengths"
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"
LOG_PROBS = "output_log_probs"

NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "request_output_len", "max_new_tokens"),
    "min_tokens": ("min_tokens", "min_length"),
    "temperature": ("temperature",),
    "top_p": ("top_p", "runtime_top_p"),
    "top_k": ("top_k", "runtime_top_k"),
    "min_p": ("min_p",),
    "seed": ("seed", "random_seed"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "length_penalty": ("length_penalty", "len_penalty"),
    "ignore_eos": ("ignore_eos",),
    "skip_special_tokens": ("skip_special_tokens",),
    "stop": ("stop_words", "stop_words_list", "stop"),
    "bad_words": ("bad_words", "bad_words_list"),
}
"""Fields of Sampling to the inputs that may carry them; the older name last."""

LLM_API_PREFIX = "sampling_param_"
"""Prefix of the LLM API's inputs, which are named after the fields."""

VLLM_PARAMETERS = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "include_stop",
        "bad_words",
        "ignore_eos",
        "skip_special_tokens",
    }
)
"""Fields that vLLM's SamplingParams take through JSON. Not logit_bias: vLLM fails on its keys, which become texts."""

_SCALARS = VLLM_PARAMETERS - {"stop", "stop_token_ids", "bad_words"}
"""Fields that fit into request parameters, which the first versions of the backend read instead."""

_STREAMING = ("stream", "streaming")
_EXCLUDE = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_LENGTH_KEYS = ("max_seq_len", "max_model_len", "max_sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSchema:
    """How to call a language model on Triton.

    `prompt`: the input that it reads. `fields`: Sampling fields to the inputs that carry them; vLLM's are sent as one
    JSON text. `parameters`: all fields that it honors. `batched`: tensors have a batch axis of 1. `decoupled`: it
    responds on a stream. `streaming`: the input that requests pieces, `exclude` the one that keeps the prompt out of
    the answer, `cancel` the one that ends a generation by its id, `flags` those that request further outputs; "" and ()
    if it has none. `guide`: vLLM's name of guided decoding. `adapter`: the input that selects a LoRA. `context_tokens`
    None: not in its configuration. `parts`: models that it consists of.
    """

    name: str
    family: Family
    prompt: str
    inputs: Mapping[str, Tensor]
    outputs: frozenset[str]
    batched: bool = False
    decoupled: bool = False
    output_mode: OutputMode = "delta"
    fields: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    streaming: str = ""
    exclude: str = ""
    cancel: str = ""
    flags: tuple[str, ...] = ()
    guide: str = ""
    adapter: str = ""
    context_tokens: int | None = None
    instances: int = 1
    version: str = ""
    parts: frozenset[str] = frozenset()

    @property
    def style(self) -> str:
        return self.family

    @property
    def streams(self) -> bool:
        """Whether it can return pieces."""
        return self.decoupled and (bool(self.streaming) or self.family == "text")

    @property
    def includes_prompt(self) -> bool:
        """Whether a whole answer begins with the prompt, and no input can leave that out."""
        return self.family in ("vllm", "trtllm", "tokens") and not self.exclude

    @property
    def tensors(self) -> tuple[object, ...]:
        """Equal while the model can be called as before."""
        return (self.family, tuple(self.inputs.values()), self.outputs, self.batched, self.decoupled, self.output_mode)


def detect_llm(config: ModelConfig, metadata: ModelMetadataResponse) -> LlmSchema | None:
    """Return how to call the model; None if it does not generate text. Raises ConfigError, with the reason, if a prompt
    alone is not enough to call it."""
    model = read_tensors(config, metadata)
    kind = detect_family(config, metadata, model)
    if not kind:
        return None
    family = FAMILIES[kind]
    if family == "trtllm" and (model.max_batch_size == 0 or model.inputs["max_tokens"].optional):
        family = "text"  # TensorRT-LLM's own require it, and a batch axis
    prompt = IDS if family == "tokens" else TEXT
    output = OUTPUT_IDS if family == "tokens" else OUTPUT
    if prompt not in model.inputs or output not in model.outputs:
        raise model.refuse(f"generates text ({kind}), but not from {prompt} to {output}: Shoal cannot call it")
    fields = _fields(model, family)
    schema = LlmSchema(
        name=model.name,
        family=family,
        prompt=prompt,
        inputs=model.inputs,
        outputs=frozenset(model.outputs),
        batched=model.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        output_mode=_output_mode(config, family),
        fields=fields,
        parameters=_parameters(config, model, family, fields),
        streaming=_flag(model, *_STREAMING),
        exclude=_flag(model, *_EXCLUDE),
        cancel=_flag(model, "stop") if family in ("trtllm", "tokens", "llmapi") else "",
        flags=tuple(name for name in _FLAGS if _flag(model, name)),
        guide=_vllm_guide(model) if family == "vllm" else "",
        adapter=_adapter(model, family),
        context_tokens=_context_tokens(config),
        instances=count_instances(config),
        version=newest_version(metadata),
        parts=find_parts(config),
    )
    _check_required_inputs(model, schema)
    return schema


def find_parts(config: ModelConfig) -> frozenset[str]:
    """Return the models that an ensemble or TensorRT-LLM's BLS calls, which are not served beside it."""
    steps = {step.model_name for step in config.ensemble_scheduling.step}
    if "tensorrt_llm_model_name" in config.parameters or "accumulate_tokens" in config.parameters:
        steps |= {"preprocessing", "postprocessing", _parameter(config, "tensorrt_llm_model_name") or "tensorrt_llm"}
        steps |= {_parameter(config, f"{name}_name") for name in ("tensorrt_llm_draft_model", "multimodal_encoders")}
    return frozenset(steps - {"", config.name})


def _output_mode(config: ModelConfig, family: Family) -> OutputMode:
    if family == "tokens":
        return "ids"
    accumulated = _parameter(config, "accumulate_tokens").lower() in ("true", "1")
    return "cumulative" if family == "llmapi" or accumulated else "delta"


def _fields(model: Tensors, family: Family) -> dict[str, str]:
    """Return the Sampling fields that the model takes, with the inputs that carry them."""
    if family in ("vllm", "dynamo"):
        return {}
    found: dict[str, str] = {}
    for name, usual in NAMES.items():
        candidates = (LLM_API_PREFIX + name,) if family == "llmapi" else usual
        own = next((each for each in candidates if each in model.inputs and _fits(name, model.inputs[each])), None)
        if own is not None:
            found[name] = own
    return found


def _fits(name: str, tensor: Tensor) -> bool:
    """Return whether the type of an input can carry the field: `stop` may be a text, or the flag that cancels."""
    if name in ("stop", "bad_words"):
        return tensor.datatype == "BYTES" or (tensor.datatype == "INT32" and tensor.dims[:1] == (2,))
    if name in ("ignore_eos", "skip_special_tokens"):
        return tensor.datatype == "BOOL"
    return tensor.datatype not in ("BYTES", "BOOL", "?")


def _parameters(config: ModelConfig, model: Tensors, family: Family, fields: Mapping[str, str]) -> frozenset[str]:
    has = model.inputs.keys()
    if family == "vllm":
        if SAMPLING not in has:
            return _SCALARS
        logprobs = {"logprobs"} if "return_logprobs" in has and "logprobs" in model.outputs else set()
        return VLLM_PARAMETERS | logprobs | ({"guide"} if _vllm_guide(model) else set())
    able = set(fields)
    if {GUIDE, GUIDE_TYPE} <= has:
        able.add("guide")
    # An ensemble's log probabilities come without tokens: only pieces show which text they belong to.
    has_pieces = family == "tokens" or config.model_transaction_policy.decoupled
    if "return_log_probs" in has and LOG_PROBS in model.outputs and has_pieces and family in ("trtllm", "tokens"):
        able.add("logprobs")
    if family == "tokens":
        able |= {"stop_token_ids"} if "stop" in fields else set()
        able |= {"ignore_eos"} if "end_id" in has else set()
    return frozenset(able)


def _vllm_guide(model: Tensors) -> str:
    """Return the key of SamplingParams, which vLLM renamed. The backend's other inputs show its release: guided
    decoding came just after `return_num_input_tokens` (25.01), the new name just after `embedding_request` (25.11)."""
    if not {SAMPLING, "return_num_input_tokens"} <= model.inputs.keys():
        return ""
    return "structured_outputs" if "embedding_request" in model.inputs else "guided_decoding"


def _adapter(model: Tensors, family: Family) -> str:
    if family == "vllm":
        return SAMPLING if SAMPLING in model.inputs else ""
    name = "lora_name" if family == "llmapi" else "lora_task_id"
    return name if name in model.inputs else ""


def _flag(model: Tensors, *names: str) -> str:
    return next((name for name in names if name in model.inputs and model.inputs[name].datatype == "BOOL"), "")


def _context_tokens(config: ModelConfig) -> int | None:
    """Return the context length, None if unknown. An unfilled template still says "${max_seq_len}"."""
    values = (_parameter(config, name) for name in _LENGTH_KEYS)
    return next((int(value) for value in values if value.isdecimal() and int(value)), None)


def _parameter(config: ModelConfig, name: str) -> str:
    value = config.parameters[name].string_value if name in config.parameters else ""
    return "" if value.startswith("${") else value


def _check_required_inputs(model: Tensors, schema: LlmSchema) -> None:
    known = {schema.prompt, SAMPLING, LENGTHS, schema.streaming, schema.exclude, schema.cancel, *schema.flags}
    known.update(schema.fields.values())
    missing = [str(one) for one in model.inputs.values() if not one.optional and one.name not in known]
    if missing:
        raise model.refuse(f"requires unknown inputs: {', '.join(missing)}")
    expected = "INT32 or INT64" if schema.prompt == IDS else "BYTES"
    if model.inputs[schema.prompt].datatype not in expected.split(" or "):
        raise model.refuse(f"takes {model.inputs[schema.prompt]}, but a prompt is {expected}")
