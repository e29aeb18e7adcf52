"""Runs inside Triton: a Llama of two layers with random weights, token ids to token ids as TensorRT-LLM's engine does.

The weights follow from the parameter `seed` of the configuration, the tokens from the request's `seed`. A `stop`
request ends the one of the same id.
"""

import json
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
HIDDEN, HEADS, LAYERS, INNER = 32, 4, 2, 64
SIZE = HIDDEN // HEADS


class Llama:
    """Attention over all that came so far, computed anew for each token: texts are short here."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.embedding = draw.standard_normal((vocabulary, HIDDEN))
        self.head = draw.standard_normal((HIDDEN, vocabulary))
        shapes = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)]
        self.layers = [[draw.standard_normal(shape) / np.sqrt(shape[0]) for shape in shapes] for _ in range(LAYERS)]

    def logits(self, ids: list[int]) -> Any:
        """Of the token after the last, [vocabulary]."""
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
        """A token and the logarithm of its probability; the likeliest for a top_k of 1."""
        scores = self.logits(ids) / (temperature or 1.0)
        scores -= scores.max()
        logs = scores - np.log(np.exp(scores).sum())
        token = int(logs.argmax()) if top_k == 1 else int(draw.choice(len(logs), p=np.exp(logs) / np.exp(logs).sum()))
        return token, float(logs[token])


def normed(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def split(x: Any) -> Any:
    """[length, hidden] to [heads, length, size]."""
    return x.reshape(len(x), HEADS, SIZE).transpose(1, 0, 2)


def turned(x: Any) -> Any:
    """Rotary positions."""
    angles = np.arange(x.shape[1])[:, None] / 10000 ** (np.arange(SIZE // 2) * 2 / SIZE)
    one, other = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([one * cosine - other * sine, one * sine + other * cosine], -1)


class TritonPythonModel:
    def initialize(self, args: Any) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
        self.notes = parameters["notes"]
        self.delay_ms = int(parameters.get("DELAY_MS", "0"))
        self.model = Llama(int(parameters["vocabulary"]), int(parameters["seed"]))
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.stopped: set[str] = set()

    def execute(self, requests: Any) -> Any:
        if not self.decoupled:
            return [self.respond(list(self.steps(request, lambda: False))) for request in requests]
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
        steps = self.steps(request, lambda: sender.is_cancelled() or request_id in self.stopped)
        if value(request, "streaming", False):
            for step in steps:
                sender.send(self.respond([step]))
        else:
            sender.send(self.respond(list(steps)))
        if sender.is_cancelled() or request_id in self.stopped:
            self.note("cancelled", request_id)
        sender.send(flags=FINAL)

    def steps(self, request: Any, left: Any) -> Any:
        """Token after token, with its log probability: up to the length asked for, or the token that ends it."""
        length = value(request, "input_lengths", 0)
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()[0].tolist()[:length]
        words = words_of(pb_utils.get_input_tensor_by_name(request, "stop_words_list"))
        end, start = value(request, "end_id", -1), len(ids)
        draw = np.random.default_rng(value(request, "seed", 0))
        for _ in range(value(request, "request_output_len", 0)):
            if left():
                return
            time.sleep(self.delay_ms / 1000)
            temperature = value(request, "temperature", 1.0)
            token, log = self.model.next(ids, temperature, value(request, "runtime_top_k", 1), draw)
            ids.append(token)
            yield token, log
            if token == end or any(ids[start:][-len(word) :] == word for word in words):
                return

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
    """Words out of [1, 2, n]: their tokens, and where each of them ends."""
    if tensor is None:
        return []
    flat, ends = tensor.as_numpy()[0].tolist()
    begins = [0, *ends]
    return [flat[begin:end] for begin, end in zip(begins, ends) if end != -1]  # noqa: B905 - Python 3.8 may run it
