"""Language models for the fake Triton: the tensors of each kind, as their sources have them, and answers by a script.

    model = triton.add(talker("vllm", Script(["Hello", " world"])))
    ...
    model.script.requests[0]["text_input"]

`requests` keeps the inputs of each request, `cancelled` the ids that a `stop` request named.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, Refused, reply

Kind: TypeAlias = Literal["vllm", "old_vllm", "ensemble", "gpt", "bls", "tokens", "llmapi", "dynamo", "text"]

_TRTLLM = """
max_tokens INT32 1
bad_words? STRING -1
stop_words? STRING -1
end_id? INT32 1
pad_id? INT32 1
top_k? INT32 1
top_p? FP32 1
temperature? FP32 1
length_penalty? FP32 1
repetition_penalty? FP32 1
presence_penalty? FP32 1
frequency_penalty? FP32 1
min_tokens? INT32 1
seed? UINT64 1
return_log_probs? BOOL 1
beam_width? INT32 1
stream? BOOL 1
exclude_input_in_output? BOOL 1
return_num_input_tokens? BOOL 1
return_num_output_tokens? BOOL 1
lora_task_id? UINT64 1
guided_decoding_guide_type? STRING 1
guided_decoding_guide? STRING 1
"""
_COUNTS = "num_input_tokens INT32 1\nnum_output_tokens INT32 1"
_VLLM = """
text_input STRING 1
image? STRING -1
stream? BOOL 1
sampling_parameters? STRING 1
exclude_input_in_output? BOOL 1
return_finish_reason? BOOL 1
return_cumulative_logprob? BOOL 1
return_logprobs? BOOL 1
return_num_input_tokens? BOOL 1
return_num_output_tokens? BOOL 1
embedding_request? STRING 1
"""
_VLLM_OUT = """
text_output STRING -1
finish_reason STRING -1
cumulative_logprob FP32 -1
logprobs STRING -1
num_input_tokens UINT32 1
num_output_tokens UINT32 -1
"""

TENSORS: dict[Kind, tuple[str, str]] = {
    "vllm": (_VLLM, _VLLM_OUT),
    "old_vllm": ("text_input STRING 1\nstream? BOOL 1", "text_output STRING -1"),
    "ensemble": (
        "text_input STRING 1" + _TRTLLM,
        f"text_output STRING -1\ncum_log_probs FP32 -1\noutput_log_probs FP32 -1,-1\n{_COUNTS}",
    ),
    "bls": ("text_input STRING 1" + _TRTLLM, f"text_output STRING -1\n{_COUNTS}"),
    "gpt": (
        """
        text_input STRING -1
        max_tokens INT32 -1
        bad_words STRING -1
        stop_words STRING -1
        top_k? INT32 1
        top_p? FP32 1
        temperature? FP32 1
        min_length? INT32 1
        random_seed? UINT64 1
        """,
        "text_output STRING -1,-1",
    ),
    "tokens": (
        """
        input_ids? INT32 -1
        input_lengths INT32 1
        request_output_len INT32 1
        end_id? INT32 1
        pad_id? INT32 1
        stop_words_list? INT32 2,-1
        bad_words_list? INT32 2,-1
        temperature? FP32 1
        runtime_top_k? INT32 1
        runtime_top_p? FP32 1
        len_penalty? FP32 1
        min_tokens? INT32 1
        seed? UINT64 1
        return_log_probs? BOOL 1
        exclude_input_in_output? BOOL 1
        stop? BOOL 1
        streaming? BOOL 1
        lora_task_id? UINT64 1
        """,
        "output_ids INT32 -1,-1\nsequence_length INT32 -1\noutput_log_probs FP32 -1,-1",
    ),
    "llmapi": (
        """
        text_input STRING -1
        streaming? BOOL 1
        sampling_param_best_of? INT32 1
        sampling_param_temperature? FP32 1
        sampling_param_top_k? INT32 1
        sampling_param_top_p? FP32 1
        sampling_param_frequency_penalty? FP32 1
        sampling_param_presence_penalty? FP32 1
        sampling_param_max_tokens? INT32 1
        sampling_param_stop? STRING -1
        sampling_param_seed? UINT64 1
        sampling_param_exclude_input_from_output? BOOL 1
        return_finish_reason? BOOL 1
        return_stop_reason? BOOL 1
        stop? BOOL 1
        lora_id? UINT64 1
        lora_name? STRING 1
        lora_path? STRING 1
        """,
        "text_output STRING -1\nfinish_reason STRING -1\nstop_reason STRING -1",
    ),
    "dynamo": ("text_input STRING 1\nstreaming? BOOL 1", "text_output STRING -1\nfinish_reason STRING -1"),
    "text": ("text_input STRING 1\nmax_tokens? INT32 1\ntemperature? FP32 1", "text_output STRING 1"),
}
"""Inputs and outputs, a line each: name (with ? for an optional one), type, dims."""

BATCHED = ("ensemble", "gpt", "bls", "tokens")
DECOUPLED = ("vllm", "old_vllm", "ensemble", "bls", "tokens", "llmapi", "dynamo")


def talker_config(
    kind: Kind, name: str = "llm", *, decoupled: bool | None = None, without: Sequence[str] = (), more: str = ""
) -> pb.ModelConfig:
    """Return the configuration of a model of that kind; `without` names omitted inputs, `more` are additional ones."""
    inputs, outputs = TENSORS[kind]
    config = pb.ModelConfig(name=name, backend="vllm" if "vllm" in kind else "python")
    config.max_batch_size = 8 if kind in BATCHED else 0
    config.model_transaction_policy.decoupled = kind in DECOUPLED if decoupled is None else decoupled
    if kind == "dynamo":
        config.platform = "dynamo"
    input_lines = [line for line in inputs.split("\n") if line.strip() and line.split()[0].rstrip("?") not in without]
    for line in (*input_lines, *filter(str.strip, more.split("\n"))):
        own, datatype, dims = line.split()
        config.input.add(
            name=own.rstrip("?"),
            data_type=pb.DataType.Value(f"TYPE_{datatype}"),
            dims=[int(size) for size in dims.split(",")],
            optional=own.endswith("?"),
        )
    for line in outputs.split("\n"):
        if line.strip():
            own, datatype, dims = line.split()
            sizes = [int(size) for size in dims.split(",")]
            config.output.add(name=own, data_type=pb.DataType.Value(f"TYPE_{datatype}"), dims=sizes)
    return config


@dataclass
class Script:
    """What a model answers: each of `words` is one response (token ids for a model of tokens; bytes stay as they are).

    `fails`: the error after all words, `accepted` as in Refused. `hold`: responses after which it hangs.
    `finish`: the finish reason. `cumulative`: each text repeats the ones before. `logprob`: of every token.
    `prepend`: a whole answer begins with the prompt unless that is excluded.
    """

    words: Sequence[Any] = ("Hello", " world")
    fails: str = ""
    accepted: bool = True
    hold: int | None = None
    finish: str = "stop"
    final: bool | None = None
    cumulative: bool = False
    logprob: float = -0.5
    prepend: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


@dataclass
class Talker(FakeModel):
    """A FakeModel with its script."""

    script: Script = field(default_factory=Script)


def talker(kind: Kind, script: Script | None = None, name: str = "llm", **fields: Any) -> Talker:
    """Return a model of that kind; `fields` are those of `talker_config`."""
    script = script or Script()
    config = talker_config(kind, name, **fields)
    decoupled = config.model_transaction_policy.decoupled

    def answer(request: pb.ModelInferRequest) -> Any:
        inputs = decode_inputs(request)
        cancels = kind in ("tokens", "llmapi") and inputs.get("stop") is True
        if cancels:
            script.cancelled.append(request.id)
            raise Refused("Request cancelled by client")
        script.requests.append(inputs)
        script.ids.append(request.id)
        if decoupled:
            return _responses(kind, script, request, inputs)
        return _whole(kind, script, request, inputs)

    return Talker(name, config=config, answer=answer, script=script, platform=config.platform)


def decode_inputs(request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return a request's tensors as plain values with decoded texts; axes of size 1 are removed."""
    return {name: _plain(array.tolist()) for name, array in triton_codec.read_inputs(request).items()}


def _plain(values: Any) -> Any:
    if isinstance(values, list):
        return _plain(values[0]) if len(values) == 1 else [_plain(one) for one in values]
    return values.decode() if isinstance(values, bytes) else values


def texts(*values: str | bytes) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return array


async def _responses(
    kind: Kind, script: Script, request: pb.ModelInferRequest, inputs: dict[str, Any]
) -> AsyncIterator[pb.ModelInferResponse]:
    stream = bool(inputs.get("stream", inputs.get("streaming", kind == "text")))
    if not stream:
        if script.hold is not None:
            await asyncio.Event().wait()
        if script.fails:
            raise Refused(script.fails, accepted=script.accepted)
        yield _whole(kind, script, request, inputs)
        return
    for number, word in enumerate(script.words):
        if script.hold == number:
            await asyncio.Event().wait()
        last = number + 1 == len(script.words) and not script.fails and script.hold is None
        so_far = script.words[: number + 1]
        text = _join_responses(so_far) if kind == "llmapi" or script.cumulative else word
        yield reply(request, final=script.final, **_tensors(kind, script, inputs, text, [word], last))
    if script.hold == len(script.words):
        await asyncio.Event().wait()
    if script.fails:
        raise Refused(script.fails, accepted=script.accepted)


def _whole(kind: Kind, script: Script, request: pb.ModelInferRequest, inputs: dict[str, Any]) -> pb.ModelInferResponse:
    words = list(script.words)
    excluded = inputs.get("exclude_input_in_output", inputs.get("sampling_param_exclude_input_from_output"))
    prepends = script.prepend and not excluded and kind in ("vllm", "old_vllm", "ensemble", "gpt", "llmapi", "tokens")
    if kind == "tokens":
        before = inputs["input_ids"] if prepends else []
        words = [*(before if isinstance(before, list) else [before]), *words]
        text: Any = ""
    else:
        text = _join_responses([inputs["text_input"], *words] if prepends else words)
    return reply(request, final=None, **_tensors(kind, script, inputs, text, words, True))


def _join_responses(words: Sequence[Any]) -> Any:
    if any(isinstance(word, bytes) for word in words):
        return b"".join(word if isinstance(word, bytes) else word.encode() for word in words)
    return "".join(map(str, words))


def _tensors(
    kind: Kind, script: Script, inputs: dict[str, Any], text: Any, words: Sequence[Any], last: bool
) -> dict[str, Array]:
    if kind == "tokens":
        ids = np.array([[words]], np.int32)
        found: dict[str, Array] = {"output_ids": ids, "sequence_length": np.array([[len(words)]], np.int32)}
        if inputs.get("return_log_probs"):
            found["output_log_probs"] = np.full((1, 1, len(words)), script.logprob, np.float32)
        return found
    shape = (1, 1) if kind == "gpt" else (1,)
    found = {"text_output": texts(text).reshape(shape)}
    if inputs.get("return_finish_reason") or kind == "dynamo":
        found["finish_reason"] = texts(script.finish if last else "None")
    if inputs.get("return_num_input_tokens"):
        found["num_input_tokens"] = np.array(7, np.uint32) if kind == "vllm" else np.array([[7]], np.int32)
    if inputs.get("return_num_output_tokens"):
        found["num_output_tokens"] = np.array([len(words)], np.uint32 if kind == "vllm" else np.int32)
    if inputs.get("return_logprobs"):
        found["logprobs"] = texts(json.dumps([vllm_logprob(str(word), script.logprob) for word in words]))
    if inputs.get("return_log_probs"):
        found["output_log_probs"] = np.full((1, len(words)), script.logprob, np.float32)
    return found


def vllm_logprob(token: str, logprob: float) -> dict[str, Any]:
    """Return logprobs as vLLM's backend writes them: by token id, the chosen one first."""
    other = {"logprob": logprob / 2, "rank": 1, "decoded_token": "other"}
    return {"11": {"logprob": logprob, "rank": 2, "decoded_token": token}, "12": other}
