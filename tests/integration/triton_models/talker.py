"""Runs inside Triton and answers as a language model of the configured `kind`. The prompt controls the answer:

count=N     N words, "w0 w1 ..."; "Hello from Triton." without it
say=HEX-... the bytes of each piece, instead of the words; the last `say` of a prompt counts
delay_ms=N  the delay before each piece; DELAY_MS of the configuration without it
first_ms=N  an additional delay before the first piece
fail=N      an error after N pieces
echo        the input tensors as JSON, instead of the words

Writes "KIND began ID" for every answer, "KIND cancelled ID" when its caller leaves, and "KIND stopped ID" for a
request with `stop`.
"""

import json
import re
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PROMPT_TOKENS = 7
FAILED = "told to fail in the middle"
LOOK_S = 0.02
"""Seconds between two checks whether the caller has left."""


class TritonPythonModel:
    def initialize(self, args: Any) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
        self.notes, self.kind = parameters["notes"], parameters["kind"]
        self.delay_ms = int(parameters.get("DELAY_MS", "0"))
        self.names = [each["name"] for each in config["input"]]
        self.batched = config["max_batch_size"] > 0
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.stopped: set[str] = set()

    def note(self, word: str, request_id: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{self.kind} {word} {request_id}\n")

    def execute(self, requests: Any) -> Any:
        if not self.decoupled:
            return [self.whole(self.inputs(request), request) for request in requests]
        for request in requests:
            threading.Thread(target=self.talk, args=(request, request.get_response_sender())).start()
        return None

    def inputs(self, request: Any) -> dict[str, Any]:
        """Return the request's tensors as plain values: a list, or the value itself if there is only one."""
        found = {}
        for name in self.names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                values = [
                    each.decode() if isinstance(each, bytes) else each for each in tensor.as_numpy().ravel().tolist()
                ]
                found[name] = values[0] if len(values) == 1 else values
        return found

    def talk(self, request: Any, sender: Any) -> None:
        inputs = self.inputs(request)
        request_id = request.request_id()
        if inputs.get("stop") is True:
            self.stopped.add(request_id)
            self.note("stopped", request_id)
            sender.send(pb_utils.InferenceResponse([], error=cancelled()), flags=FINAL)
            return
        if not (inputs.get("stream") or inputs.get("streaming") or self.kind == "text"):
            sender.send(self.whole(inputs, request), flags=FINAL)
            return
        self.note("began", request_id)
        words, fails = self.script(inputs)
        for number, word in enumerate(words):
            if not self.waits(inputs, number, lambda: sender.is_cancelled() or request_id in self.stopped):
                self.note("cancelled", request_id)
                sender.send(pb_utils.InferenceResponse([], error=cancelled()), flags=FINAL)
                return
            text = b"".join(words[: number + 1]) if self.kind == "llmapi" else word
            last = number + 1 == len(words) and not fails
            sender.send(self.response(inputs, text, [word], number + 1 if last else None))
        if fails:
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(FAILED)))
        sender.send(flags=FINAL)

    def whole(self, inputs: dict[str, Any], request: Any) -> Any:
        request_id = request.request_id()
        self.note("began", request_id)
        words, fails = self.script(inputs)
        for number in range(len(words)):
            if not self.waits(inputs, number, lambda: request.is_cancelled() or request_id in self.stopped):
                self.note("cancelled", request_id)
                return pb_utils.InferenceResponse([], error=cancelled())
        if fails:
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(FAILED))
        excluded = inputs.get("exclude_input_in_output", inputs.get("sampling_param_exclude_input_from_output"))
        before = inputs["text_input"].encode() if not excluded and self.kind != "text" else b""
        return self.response(inputs, before + b"".join(words), words, len(words))

    def script(self, inputs: dict[str, Any]) -> tuple[list[bytes], bool]:
        """Return the words, and whether an error follows them."""
        prompt = inputs["text_input"]
        if "echo" in prompt:
            return [json.dumps({name: inputs[name] for name in sorted(inputs)}).encode()], False
        count = re.search(r"count=(\d+)", prompt)
        words = [f"w{number} " for number in range(int(count[1]))] if count else ["Hello", " from", " Triton."]
        pieces = [word.encode() for word in words]
        matches = re.findall(r"say=([0-9a-f-]+)", prompt)
        if matches:
            pieces = [bytes.fromhex(each) for each in matches[-1].split("-")]
        fails = re.search(r"fail=(\d+)", prompt)
        return pieces[: int(fails[1])] if fails else pieces[: self.max_tokens(inputs)], bool(fails)

    def max_tokens(self, inputs: dict[str, Any]) -> Any:
        """Return the token limit of the request, or None."""
        if "sampling_parameters" in inputs:
            return json.loads(inputs["sampling_parameters"]).get("max_tokens")
        return inputs.get("max_tokens", inputs.get("sampling_param_max_tokens"))

    def waits(self, inputs: dict[str, Any], number: int, left: Any) -> bool:
        """Wait for the delay of word `number`. Return False as soon as the caller has left."""
        first = re.search(r"first_ms=(\d+)", inputs["text_input"]) if number == 0 else None
        end = time.monotonic() + self.delay(inputs) + (int(first[1]) / 1000 if first else 0)
        while not left():
            rest = end - time.monotonic()
            if rest <= 0:
                return True
            time.sleep(min(rest, LOOK_S))
        return False

    def delay(self, inputs: dict[str, Any]) -> float:
        match = re.search(r"delay_ms=(\d+)", inputs["text_input"])
        return (int(match[1]) if match else self.delay_ms) / 1000

    def response(self, inputs: dict[str, Any], text: bytes, words: list[bytes], ended: Any) -> Any:
        """Return one response. `words` are the new ones; `ended` is the total count of the last response, else None."""
        tensors = {"text_output": np.array([text], dtype=object)}
        if inputs.get("return_finish_reason") or self.kind == "dynamo":
            reason = b"None" if ended is None else b"length" if ended == self.max_tokens(inputs) else b"stop"
            tensors["finish_reason"] = np.array([reason], dtype=object)
        if inputs.get("return_num_input_tokens"):
            tensors["num_input_tokens"] = self.count(PROMPT_TOKENS)
        if inputs.get("return_num_output_tokens"):
            tensors["num_output_tokens"] = self.count(len(words))
        if inputs.get("return_logprobs"):
            texts = [word.decode(errors="replace") for word in words]
            tokens = [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": text}} for text in texts]
            tensors["logprobs"] = np.array([json.dumps(tokens).encode()], dtype=object)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array[None] if self.batched else array) for name, array in tensors.items()]
        )

    def count(self, number: int) -> Any:
        return np.array([number], np.uint32 if self.kind == "vllm" else np.int32)


def cancelled() -> Any:
    return pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
