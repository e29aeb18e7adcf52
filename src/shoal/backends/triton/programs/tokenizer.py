"""A tokenizer in Triton's python backend: the tokenizer.json beside this file, for the ensemble that takes texts.

Texts get the model's default prompt and task, are truncated at the end to the model's maximum length, and are padded to
the longest of their request. Written by Shoal; needs numpy and tokenizers in Triton's Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from tokenizers import Tokenizer, normalizers


class TritonPythonModel:
    """One instance. The parameter `shoal_text`, Shoal's TextSpec as JSON, configures it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises the tokenizers library's error for an invalid tokenizer.json."""
        config = json.loads(args["model_config"])
        spec = json.loads(config["parameters"]["shoal_text"]["string_value"])
        self.outputs = [one["name"] for one in config["output"]]
        self.prompt = spec["prompts"].get(spec["default_prompt_name"], "")
        self.pad = spec["pad_id"]
        self.adapter = default_adapter(spec)
        self.tokenizer = read(Path(__file__).with_name("tokenizer.json"), spec["lower_case"])
        self.tokenizer.enable_truncation(spec["max_tokens"])
        self.skip = 0 if spec["include_prompt"] or not self.prompt else self.count_tokens(self.prompt)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> Any:
        if request.is_cancelled():
            return failure("the client cancelled the request", pb_utils.TritonError.CANCELLED)
        raw = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
        try:
            texts = [self.prompt + one.decode() for one in raw]
        except UnicodeDecodeError:
            return failure("the texts must be UTF-8", pb_utils.TritonError.INVALID_ARG)
        try:
            rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]
        except Exception as error:  # the tokenizers library raises plain Exception for everything
            return failure(f"the tokenizer failed on these texts: {error}", pb_utils.TritonError.INVALID_ARG)
        if not all(rows):
            empty = next(i for i, row in enumerate(rows) if not row)
            return failure(f"input {empty}: the tokenizer returned no tokens", pb_utils.TritonError.INVALID_ARG)
        made = self.tensors(rows)
        wanted = [name for name in self.outputs if name in request.requested_output_names()]
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, made[name]) for name in wanted])

    def tensors(self, rows: list[list[int]]) -> dict[str, Any]:
        """Return int64 tensors [texts, longest], padded at the end."""
        lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
        width = int(lengths.max())
        ids = np.full((len(rows), width), self.pad, dtype=np.int64)
        for to, row in zip(ids, rows, strict=True):
            to[: len(row)] = row
        positions = np.arange(width, dtype=np.int64)
        attended = positions < lengths
        return {
            "input_ids": ids,
            "attention_mask": attended.astype(np.int64),
            "token_type_ids": np.zeros_like(ids),
            "position_ids": np.tile(positions, (len(rows), 1)),
            "pooling_mask": (attended & (positions >= self.skip)).astype(np.int64),
            "adapter_ids": np.full_like(ids, self.adapter),
        }

    def count_tokens(self, prompt: str) -> int:
        """Count the prompt's tokens without a special token at the end, as sentence-transformers does."""
        ids = self.tokenizer.encode_batch_fast([prompt])[0].ids
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        return len(ids) - (ids[-1] in special) if ids else 0


def default_adapter(spec: dict[str, Any]) -> int:
    """Return the number of the adapter for the task of the default prompt's name, else for the default task; 0 for
    none."""
    tasks, name = spec["embedding_tasks"], spec["default_prompt_name"]
    task = name if name in tasks else spec["default_embedding_task"]
    return 0 if task is None else tasks.index(task) + 1


def read(path: Path, lower_case: bool) -> Tokenizer:
    """Read a tokenizer, without its own padding and truncation; lowercasing comes before its normalizer."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    own = tokenizer.normalizer
    parts = [] if own is None else [own]
    if isinstance(own, normalizers.Sequence):
        parts = [own[i] for i in range(len(own))]
    if lower_case and not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])
    return tokenizer


def failure(message: str, code: Any) -> Any:
    # Triton's stub writes messages to a log that may accept only ASCII.
    return pb_utils.InferenceResponse([], pb_utils.TritonError(ascii(message)[1:-1], code))
