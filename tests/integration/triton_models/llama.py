"""Runs inside Triton: a Llama of two layers with random weights, token ids to token ids as TensorRT-LLM's engine does.

The weights follow from the parameter `seed` of the configuration, the tokens from the request's `seed`. A `stop`
request ends the one of the same id. Where the parameter `pieces` tells the bytes of each token, as hex, a prompt may
hold the words of `talker`: `delay_ms=N`, `first_ms=N`, `fail=N`, and `say=ID-ID-...` for the tokens of its answer.
"""

import json
import re
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LOOK_S = 0.02
"""Seconds between two checks whether the caller has left."""

HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 64
SIZE = HIDDEN // HEADS


class Llama:
    """Attention over all previous tokens, recomputed for each token: texts are short here."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.embedding = draw.standard_normal((vocabulary, HIDDEN))
        self.head = draw.standard_normal((HIDDEN, vocabulary))
        shapes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)]
        self.layers = [[draw.standard_normal(shape) / np.sqrt(shape[0]) for shape in shapes] for _ in range(LAYERS)]

    def logits(self, ids: list[int]) -> Any:
        """Return the logits of the next token, [vocabulary]."""
        hidden = self.embedding[ids]
        mask = np.triu(np.full((len(ids), len(ids)), -1e9), 1)
        for query, key, value, out, gate, up, down in self.layers:
            x = normed(hidden)
            q, k, v = (turned(split(x @ query)), turned(split(x @ key)), split(x @ value))
            weights = q @ k.transpose(0, 2, 1) / np.sqrt(SIZE) + mask
            weights = np.exp(weights - weights.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            hidden = hidden + (weights @ v).transpose(1, 0, 2).reshape(len(ids), HIDDEN) @ out
            x = normed(hidden)
            gated = x @ gate
            hidden = hidden + (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
        return normed(hidden)[-1] @ self.head

    def next(self, ids: list[int], temperature: float, top_k: int, draw: Any) -> tuple[int, float]:
        """Return a token and its log probability; the most likely one for a top_k of 1."""
        scores = self.logits(ids) / (temperature or 1.0)
        scores -= scores.max()
        logs = scores - np.log(np.exp(scores).sum())
        token = int(logs.argmax()) if top_k == 1 else int(draw.choice(len(logs), p=np.exp(logs) / np.exp(logs).sum()))
        return token, float(logs[token])


def normed(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def split(x: Any) -> Any:
    """Reshape [length, hidden] to [heads, length, size]."""
    return x.reshape(len(x), HEADS, SIZE).transpose(1, 0, 2)


def turned(x: Any) -> Any:
    """Apply rotary positions."""
    angles = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(SIZE // 2) * 2 / SIZE)
    one, other = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([one * cosine - other * sine, one * sine + other * cosine], -1)


class ScriptedError(Exception):
    pass


class Script:
    """The script in the words of a prompt."""

    def __init__(self, prompt: str, end: int, delay_ms: int) -> None:
        matches = re.findall(r"say=([0-9-]+)", prompt)
        self.ids = [int(each) for each in matches[-1].split("-")] + [end] if matches else []
        self.fails = number_in(prompt, "fail", -1)
        self.delay_s = number_in(prompt, "delay_ms", delay_ms) / 1000
        self.first_s = number_in(prompt, "first_ms", 0) / 1000

    def token(self, number: int) -> Any:
        """Return (token, log probability), or (None, 0) if the model is to choose. Raises ScriptedError."""
        if number == self.fails:
            raise ScriptedError("told to fail in the middle")
        return (self.ids[number], -0.5) if number < len(self.ids) else (None, 0.0)

    def waits(self, number: int, left: Any) -> bool:
        """Wait the delay before a token; return False as soon as the caller has left."""
        end = time.monotonic() + self.delay_s + (self.first_s if number == 0 else 0)
        while not left():
            rest = end - time.monotonic()
            if rest <= 0:
                return True
            time.sleep(min(rest, LOOK_S))
        return False


def number_in(prompt: str, name: str, default: int) -> int:
    match = re.search(name + r"=(\d+)", prompt)
    return int(match[1]) if match else default


class TritonPythonModel:
    def initialize(self, args: Any) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
        self.notes = parameters["notes"]
        self.delay_ms = int(parameters.get("DELAY_MS", "0"))
        self.model = Llama(int(parameters["vocabulary"]), int(parameters["seed"]))
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.pieces = [bytes.fromhex(each) for each in parameters.get("pieces", "").split("-")]
        self.stopped: set[str] = set()

    def execute(self, requests: Any) -> Any:
        if not self.decoupled:
            return [self.whole(request) for request in requests]
        for request in requests:
            threading.Thread(target=self.talk, args=(request, request.get_response_sender())).start()
        return None

    def note(self, word: str, request_id: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"tokens {word} {request_id}\n")

    def talk(self, request: Any, sender: Any) -> None:
        request_id = request.request_id()
        if value(request, "stop", False):
            self.stopped.add(request_id)
            self.note("stopped", request_id)
            sender.send(self.respond([]), flags=FINAL)
            return
        left = self.looking(request, sender)
        try:
            if value(request, "streaming", False):
                for step in self.steps(request, left):
                    sender.send(self.respond([step]))
            else:
                sender.send(self.respond(list(self.steps(request, left))))
        except ScriptedError as error:
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error))))
        if left():
            self.note("cancelled", request_id)
        sender.send(flags=FINAL)

    def whole(self, request: Any) -> Any:
        if value(request, "stop", False):  # it runs after the other one
            return self.respond([])
        left = self.looking(request, request)
        try:
            response = self.respond(list(self.steps(request, left)))
        except ScriptedError as error:
            response = pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error)))
        if left():
            self.note("cancelled", request.request_id())
        return response

    def looking(self, request: Any, handle: Any) -> Any:
        """Return a function that returns whether the caller has left; `handle` is its request or response sender."""
        request_id = request.request_id()
        return lambda: handle.is_cancelled() or request_id in self.stopped

    def steps(self, request: Any, left: Any) -> Any:
        """Yield tokens with their log probabilities, up to the requested length or the end token."""
        self.note("began", request.request_id())
        length = value(request, "input_lengths", 0)
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()[0].tolist()[:length]
        words = words_of(pb_utils.get_input_tensor_by_name(request, "stop_words_list"))
        end, start = value(request, "end_id", -1), len(ids)
        script = Script(self.read(ids), end, self.delay_ms)
        draw = np.random.default_rng(value(request, "seed", 0))
        for number in range(value(request, "request_output_len", 0)):
            if not script.waits(number, left):
                return
            temperature = value(request, "temperature", 1.0)
            token, log = script.token(number)
            if token is None:
                token, log = self.model.next(ids, temperature, value(request, "runtime_top_k", 1), draw)
            ids.append(token)
            yield token, log
            if token == end or any(ids[start:][-len(word) :] == word for word in words):
                return

    def read(self, ids: list[int]) -> str:
        """Return the prompt's text, as far as the tokens are known."""
        return b"".join(self.pieces[id] for id in ids if id < len(self.pieces)).decode(errors="replace")

    def respond(self, steps: list[tuple[int, float]]) -> Any:
        tokens = np.array([[[token for token, _ in steps]]], np.int32)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("output_ids", tokens),
                pb_utils.Tensor("sequence_length", np.array([[len(steps)]], np.int32)),
                pb_utils.Tensor("output_log_probs", np.array([[[log for _, log in steps]]], np.float32)),
            ]
        )


def value(request: Any, name: str, default: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().item(0)


def words_of(tensor: Any) -> list[list[int]]:
    """Return the words of [1, 2, n]: their tokens, and the end offset of each."""
    if tensor is None:
        return []
    flat, ends = tensor.as_numpy()[0].tolist()
    begins = [0, *ends]
    return [flat[begin:end] for begin, end in zip(begins, ends) if end != -1]  # noqa: B905 - Python 3.8 may run it
