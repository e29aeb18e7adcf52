"""Matches texts against grammars with the library itself.

The library has no call for that. So its pipeline runs a model that prefers to repeat the prompt, token by token, which
succeeds only as far as the grammar allows it. With noise the same model generates any text that the grammar allows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from shoal.backends.genai.pipeline import import_libraries
from tests.unit.backends.genai.conftest import IR

WIDTH = 448
LENGTH = 400
"""Tokens of each prompt; shorter ones are padded with the end token."""


class GrammarMatcher:
    def __init__(self) -> None:
        self._openvino, self._genai = import_libraries()
        self._tokenizer = Tokenizer.from_file(str(IR / "tokenizer.json"))
        with tempfile.TemporaryDirectory() as folder:
            self._openvino.save_model(_repeating_model(self._openvino), Path(folder, "openvino_model.xml"))
            tokenizer = self._genai.Tokenizer(str(IR))
            self._end = tokenizer.get_eos_token_id()  # the token that no grammar treats as text
            self._pipeline = self._genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA")

    def accepts(self, text: str, **structure: str) -> bool:
        """Whether the grammar accepts the whole text. `structure`: arguments of the library's
        StructuredOutputConfig."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) < LENGTH
        return self._generate(ids, len(ids) + 1, None, structure) == [*ids, self._end]

    def sample(self, seed: int, tokens: int = 200, **structure: str) -> str | None:
        """Return a random text, or None if it does not end within `tokens`."""
        ids = self._generate([], tokens, seed, structure)
        return str(self._tokenizer.decode(ids[:-1], skip_special_tokens=False)) if ids[-1] == self._end else None

    def _generate(self, ids: list[int], tokens: int, seed: int | None, structure: dict[str, str]) -> list[int]:
        rules = self._genai.GenerationConfig()
        rules.max_new_tokens = tokens
        rules.eos_token_id = self._end
        rules.stop_token_ids = {self._end}
        rules.apply_chat_template = False
        if seed is not None:
            rules.do_sample, rules.rng_seed = True, seed
        rules.structured_output_config = self._genai.StructuredOutputConfig(**structure)
        prompt = np.array([ids + [self._end] * (LENGTH - len(ids))], np.int64)
        return list(self._pipeline.generate(self._openvino.Tensor(prompt), rules).tokens[0])


def _repeating_model(openvino: Any) -> Any:
    """Return a model that makes the prompt's token at each step likelier than the others by a factor of 55."""
    ops = openvino.opset13
    inputs = []
    for name, shape, kind in (
        ("input_ids", [-1, -1], np.int64),
        ("attention_mask", [-1, -1], np.int64),
        ("position_ids", [-1, -1], np.int64),
        ("beam_idx", [-1], np.int32),
    ):
        inputs.append(ops.parameter(shape, kind, name=name))
        inputs[-1].output(0).set_names({name})
    ids, _, places, _ = inputs
    info = openvino.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = openvino.PartialShape([-1, -1]), openvino.Type.f32, "prompt"
    variable = openvino.op.util.Variable(info)
    prompt = ops.read_value(ops.convert(ids, np.float32), variable)
    keep = ops.assign(prompt, variable)
    step = ops.maximum(ops.subtract(places, _constant(ops, LENGTH - 1)), _constant(ops, 0))
    token = ops.convert(ops.gather(ops.squeeze(prompt, _constant(ops, 0)), step, _constant(ops, 0)), np.int64)
    logits = ops.one_hot(
        token, _constant(ops, WIDTH), ops.constant(np.float32(4)), ops.constant(np.float32(0)), axis=-1
    )
    logits.output(0).set_names({"logits"})
    return openvino.Model([ops.result(logits)], [keep], inputs)


def _constant(ops: Any, value: int) -> Any:
    return ops.constant(np.int64(value))
