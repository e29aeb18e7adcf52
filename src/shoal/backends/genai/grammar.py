"""Compiles and tries guides before they reach the model.

The library compiles a grammar during a step, and a failure breaks the pipeline: no later step succeeds. Each guide is
therefore tried first with a model that outputs only zeros. It shares the model's tokenizer, which caches compiled
grammars.

A guide is tried twice: in a separate process (`guide_trial`), which may hang or run out of memory, and then in a thread
of the model's process, while steps continue, since the library compiles without the GIL.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.backends.genai.sampling import structure_arguments
from shoal.backends.local.errors import shorten_message
from shoal.errors import InvalidValue, OutOfMemory, ShoalError
from shoal.types import Guide

MAX_REMEMBERED = 1024
"""Maximum remembered valid guides, more than `compiling` keeps; another trial costs about a millisecond."""

STEPS = 32
STEP_S = 0.025
"""Tokens generated in a trial, and the maximum mean seconds per token: concurrent answers wait for them."""


class GuideCompiler:
    """Compiles the guides of one model. `openvino` and `genai` are the libraries, `vocabulary` the width of its
    logits."""

    def __init__(self, openvino: Any, genai: Any, tokenizer: Any, vocabulary: int) -> None:
        self._genai = genai
        self._tensor = openvino.Tensor(np.zeros((1, 1), np.int64))
        self._accepted: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._accepted_lock = threading.Lock()
        self._trial_lock = threading.Lock()
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            openvino.save_model(_zero_model(openvino, vocabulary), Path(folder, "openvino_model.xml"))
            self._pipeline = genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA")

    def structured_output(self, guide: Guide) -> Any:
        """Return the library's StructuredOutputConfig. Raises InvalidValue with the fault of the guide."""
        key = (guide.kind, guide.value)
        with self._accepted_lock:
            arguments = self._accepted.get(key)
            if arguments is not None:
                self._accepted.move_to_end(key)
                return self._genai.StructuredOutputConfig(**arguments)
        arguments = _arguments(guide)
        structured = self._genai.StructuredOutputConfig(**arguments)
        with self._trial_lock:
            self._generate_tokens(guide, structured, 1)
        with self._accepted_lock:
            self._accepted[key] = arguments
            if len(self._accepted) > MAX_REMEMBERED:
                self._accepted.popitem(last=False)
        return structured

    def prepare(self, guide: Guide, then: Callable[[ShoalError | None], None]) -> None:
        """Compile a guide in a thread, which calls `then` with None or the error. Later `structured_output` calls find
        it compiled."""

        def compile_it() -> None:
            try:
                self.structured_output(guide)
            except ShoalError as error:
                then(error)
            except MemoryError:
                then(OutOfMemory("not enough memory to compile the output format: use a simpler one"))
            else:
                then(None)

        threading.Thread(target=compile_it, name="guide", daemon=True).start()

    def try_out(self, guide: Guide) -> None:
        """Compile a guide and generate a few tokens with it, without limits of time or memory.

        Raises InvalidValue if it cannot be used, or slows down answers.
        """
        structured = self._genai.StructuredOutputConfig(**_arguments(guide))
        self._generate_tokens(guide, structured, 1)
        began = time.monotonic()
        self._generate_tokens(guide, structured, STEPS)
        if (took := time.monotonic() - began) > STEPS * STEP_S:
            raise InvalidValue(
                f"the output format takes {1000 * took / STEPS:.0f} ms per token (maximum {1000 * STEP_S:.0f}): nest "
                "fewer repeats, or use fewer properties",
                param=guide.field,
            )

    def _generate_tokens(self, guide: Guide, structured: Any, tokens: int) -> None:
        """Generate `tokens` tokens, even past the end that the guide allows. Raises InvalidValue."""
        rules = self._genai.GenerationConfig()
        rules.max_new_tokens = rules.min_new_tokens = tokens
        rules.apply_chat_template = False
        rules.structured_output_config = structured
        try:
            self._pipeline.generate(self._tensor, rules)
        except RuntimeError as error:
            raise InvalidValue(f"invalid output format: {clean_message(error)}", param=guide.field) from None


def _arguments(guide: Guide) -> dict[str, str]:
    try:
        return structure_arguments(guide)
    except InvalidValue as error:
        raise InvalidValue(error.message, param=guide.field) from None


def clean_message(error: BaseException) -> str:
    """Return the library's message without its prefix of time, source file and check."""
    text = re.sub(r"^.*?\.(?:cc|cpp|hpp|h):\d+:?", "", str(error), flags=re.DOTALL)
    return shorten_message(text.strip() or str(error))


def _zero_model(openvino: Any, vocabulary: int) -> Any:
    """Return a graph with the inputs and the output of a language model that outputs zeros."""
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
    shape = ops.concat([ops.shape_of(inputs[0]), ops.constant(np.array([vocabulary], np.int64))], 0)
    logits = ops.broadcast(ops.constant(np.float32(0)), shape)
    logits.output(0).set_names({"logits"})
    return openvino.Model([ops.result(logits)], inputs)
