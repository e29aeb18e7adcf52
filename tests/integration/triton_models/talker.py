"""Runs inside Triton, and talks as the language model whose `kind` its configuration names; the prompt says how:

count=N     so many words, "w0 w1 ..."; without it "Hello from Triton."
say=HEX-... the bytes of each piece, instead of the words; the last one in the prompt counts
delay_ms=N  before each of them; without it the parameter DELAY_MS of the configuration
first_ms=N  before the first of them, beside that
fail=N      an error after so many of them
echo        instead of the words, the tensors that it was given, as JSON

Notes "KIND began ID" for every answer, "KIND cancelled ID" when its caller has left, and "KIND stopped ID" when a
request with `stop` named it.
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
"""Between two looks for the caller."""


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
            return [self.whole(self.said(request), request) for request in requests]
        for request in requests:
            threading.Thread(target=self.talk, args=(request, request.get_response_sender())).start()
        return None

    def said(self, request: Any) -> dict[str, Any]:
        """The request's tensors as plain values; one alone for a tensor that has one."""
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
        said = self.said(request)
        request_id = request.request_id()
        if said.get("stop") is True:
            self.stopped.add(request_id)
            self.note("stopped", request_id)
            sender.send(pb_utils.InferenceResponse([], error=cancelled()), flags=FINAL)
            return
        if not (said.get("stream") or said.get("streaming") or self.kind == "text"):
            sender.send(self.whole(said, request), flags=FINAL)
            return
        self.note("began", request_id)
        words, fails = self.script(said)
        for number, word in enumerate(words):
            if not self.waits(said, number, lambda: sender.is_cancelled() or request_id in self.stopped):
                self.note("cancelled", request_id)
                sender.send(pb_utils.InferenceResponse([], error=cancelled()), flags=FINAL)
                return
            text = b"".join(words[: number + 1]) if self.kind == "llmapi" else word
            last = number + 1 == len(words) and not fails
            sender.send(self.response(said, text, [word], number + 1 if last else None))
        if fails:
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(FAILED)))
        sender.send(flags=FINAL)

    def whole(self, said: dict[str, Any], request: Any) -> Any:
        request_id = request.request_id()
        self.note("began", request_id)
        words, fails = self.script(said)
        for number in range(len(words)):
            if not self.waits(said, number, lambda: request.is_cancelled() or request_id in self.stopped):
                self.note("cancelled", request_id)
                return pb_utils.InferenceResponse([], error=cancelled())
        if fails:
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(FAILED))
        excluded = said.get("exclude_input_in_output", said.get("sampling_param_exclude_input_from_output"))
        before = said["text_input"].encode() if not excluded and self.kind != "text" else b""
        return self.response(said, before + b"".join(words), words, len(words))

    def script(self, said: dict[str, Any]) -> tuple[list[bytes], bool]:
        """The words, and whether an error follows them."""
        prompt = said["text_input"]
        if "echo" in prompt:
            return [json.dumps({name: said[name] for name in sorted(said)}).encode()], False
        count = re.search(r"count=(\d+)", prompt)
        words = [f"w{number} " for number in range(int(count[1]))] if count else ["Hello", " from", " Triton."]
        pieces = [word.encode() for word in words]
        told = re.findall(r"say=([0-9a-f-]+)", prompt)
        if told:
            pieces = [bytes.fromhex(each) for each in told[-1].split("-")]
        fails = re.search(r"fail=(\d+)", prompt)
        return pieces[: int(fails[1])] if fails else pieces[: self.most(said)], bool(fails)

    def most(self, said: dict[str, Any]) -> Any:
        """How many words the answer may have; None where nobody says."""
        if "sampling_parameters" in said:
            return json.loads(said["sampling_parameters"]).get("max_tokens")
        return said.get("max_tokens", said.get("sampling_param_max_tokens"))

    def waits(self, said: dict[str, Any], number: int, left: Any) -> bool:
        """Let the time before a word pass; False as soon as the caller has left."""
        first = re.search(r"first_ms=(\d+)", said["text_input"]) if number == 0 else None
        end = time.monotonic() + self.delay(said) + (int(first[1]) / 1000 if first else 0)
        while not left():
            rest = end - time.monotonic()
            if rest <= 0:
                return True
            time.sleep(min(rest, LOOK_S))
        return False

    def delay(self, said: dict[str, Any]) -> float:
        told = re.search(r"delay_ms=(\d+)", said["text_input"])
        return (int(told[1]) if told else self.delay_ms) / 1000

    def response(self, said: dict[str, Any], text: bytes, words: list[bytes], ended: Any) -> Any:
        """`words`: those that are new. `ended`: with so many words in all; None: there is more to come."""
        found = {"text_output": np.array([text], dtype=object)}
        if said.get("return_finish_reason") or self.kind == "dynamo":
            reason = b"None" if ended is None else b"length" if ended == self.most(said) else b"stop"
            found["finish_reason"] = np.array([reason], dtype=object)
        if said.get("return_num_input_tokens"):
            found["num_input_tokens"] = self.count(PROMPT_TOKENS)
        if said.get("return_num_output_tokens"):
            found["num_output_tokens"] = self.count(len(words))
        if said.get("return_logprobs"):
            texts = [word.decode(errors="replace") for word in words]
            tokens = [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": text}} for text in texts]
            found["logprobs"] = np.array([json.dumps(tokens).encode()], dtype=object)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array[None] if self.batched else array) for name, array in found.items()]
        )

    def count(self, number: int) -> Any:
        return np.array([number], np.uint32 if self.kind == "vllm" else np.int32)


def cancelled() -> Any:
    return pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
