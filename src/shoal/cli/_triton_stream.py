"""Streams a language model on Triton directly over gRPC: the baseline against which Shoal's overhead is measured.

Source: the input names of the vLLM backend and of both TensorRT-LLM layouts that take text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from shoal.backends.triton.client import Client
from shoal.backends.triton.response import read_outputs
from shoal.bench.answers import Answer
from shoal.bench.chat import ChatPlan
from shoal.errors import ShoalError, Unsupported
from shoal.kserve import codec
from shoal.kserve.protocol_pb2 import ModelInferRequest, ModelMetadataResponse

TEXT = "text_input"
OUTPUT = "text_output"
REQUEST_TIMEOUT_S = 600.0

_MakeInput = Callable[[ChatPlan], Any]

INPUTS: Mapping[str, _MakeInput] = {
    # vLLM
    "stream": lambda plan: plan.stream,
    "exclude_input_in_output": lambda plan: True,
    "sampling_parameters": lambda plan: json.dumps(_sampling(plan)),
    "return_num_input_tokens": lambda plan: True,
    "return_num_output_tokens": lambda plan: True,
    # TensorRT-LLM: ensembles and their BLS variant
    "max_tokens": lambda plan: plan.output_tokens,
    # TensorRT-LLM: the LLM API
    "streaming": lambda plan: plan.stream,
    "sampling_param_max_tokens": lambda plan: plan.output_tokens,
    "sampling_param_exclude_input_from_output": lambda plan: True,
}
"""Inputs sent besides the text if the model declares an input of that name."""

COUNTS = ("num_input_tokens", "num_output_tokens")
"""Optional outputs: the prompt's token count, and the token count of a chunk."""


class GrpcChatClient:
    """Streams a decoupled text model through `client`, one server stream per request.

    `outputs` names the model outputs to request.
    """

    def __init__(
        self, client: Client, plan: ChatPlan, inputs: Mapping[str, str], outputs: Sequence[str], *, rows: bool
    ) -> None:
        self._client = client
        self._shape = shape = (1, 1) if rows else (1,)
        self._head = ModelInferRequest(model_name=plan.model)
        for name in outputs:
            self._head.outputs.add(name=name)
        for name, make in INPUTS.items():
            if name in inputs and (name.removeprefix("return_") in outputs or not name.startswith("return_")):
                dtype = object if inputs[name] == "BYTES" else codec.DTYPES[inputs[name]]
                codec.add_input(self._head, name, inputs[name], np.full(shape, make(plan), dtype=dtype))

    @classmethod
    async def connect(cls, client: Client, plan: ChatPlan, *, count: bool = True) -> GrpcChatClient:
        """Read the model's inputs and outputs from the server. `count=False` requests no token counts, which is less
        work.

        Raises Unsupported if the model has no `text_input` and `text_output`, and the errors of the client.
        """
        deadline = time.monotonic() + 10
        facts: ModelMetadataResponse = await client.model_metadata(plan.model, deadline=deadline)
        config = await client.model_config(plan.model, deadline=deadline)
        inputs = {tensor.name: tensor.datatype for tensor in facts.inputs}
        has = {tensor.name for tensor in facts.outputs}
        if TEXT not in inputs or OUTPUT not in has:
            raise Unsupported(f"{plan.model} has no {TEXT} and {OUTPUT}: name a model that accepts and returns text")
        # TensorRT-LLM has these outputs too, but they count the whole answer so far; only vLLM's count one chunk.
        counts = [name for name in COUNTS if count and name in has and "sampling_parameters" in inputs]
        return cls(client, plan, inputs, [OUTPUT, *counts], rows=config.max_batch_size > 0)

    async def ask(self, prompt: str) -> Answer:
        request = ModelInferRequest()
        answer = Answer(time.perf_counter())
        request.CopyFrom(self._head)
        codec.add_input(request, TEXT, "BYTES", np.full(self._shape, prompt, dtype=object))
        try:
            async with aclosing(self._client.stream_infer(request, time.monotonic() + REQUEST_TIMEOUT_S)) as parts:
                async for part in parts:
                    found = read_outputs(part)
                    if any(found[OUTPUT].flat):
                        answer.arrivals.append(time.perf_counter())
                    if "num_output_tokens" in found:
                        answer.token_count = (answer.token_count or 0) + int(found["num_output_tokens"].sum())
                    if "num_input_tokens" in found:
                        answer.prompt_tokens = int(found["num_input_tokens"].flat[0])
        except ShoalError as error:
            answer.error = error.message
        answer.ended = time.perf_counter()
        return answer


def _sampling(plan: ChatPlan) -> dict[str, Any]:
    sampling = {"max_tokens": plan.output_tokens}
    return {**sampling, "ignore_eos": True, "min_tokens": plan.output_tokens} if plan.exact else sampling
