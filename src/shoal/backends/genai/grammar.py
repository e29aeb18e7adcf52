"""Tries the form of an answer before a model is given it.

The library compiles a grammar in the middle of a step, and one that cannot be compiled breaks the pipeline for
everybody: no later step of it succeeds. So each is tried first with a model that answers nothing but zeros; it shares
the tokenizer, where what was compiled is found again.
"""

from __future__ import annotations

import re
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from shoal.backends._errors import essence
from shoal.backends.genai.sampling import structure
from shoal.errors import InvalidValue
from shoal.types import Guide

KEPT = 256
"""Guides known to be good; more are tried again, which costs about a millisecond."""


class Grammars:
    """Of one model: `openvino` and `genai` are the libraries, `vocabulary` the width of its logits."""

    def __init__(self, openvino: Any, genai: Any, tokenizer: Any, vocabulary: int) -> None:
        self._genai = genai
        self._tensor = openvino.Tensor(np.zeros((1, 1), np.int64))
        self._good: OrderedDict[tuple[str, str], None] = OrderedDict()
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            openvino.save_model(_zeros(openvino, vocabulary), Path(folder, "openvino_model.xml"))
            self._pipeline = genai.LLMPipeline(folder, tokenizer, "CPU", ATTENTION_BACKEND="SDPA")

    def structure(self, guide: Guide) -> Any:
        """The library's StructuredOutputConfig. Raises InvalidValue, saying what is wrong with the guide."""
        structured = self._genai.StructuredOutputConfig(**structure(guide))
        key = (guide.kind, guide.value)
        if key not in self._good:
            rules = self._genai.GenerationConfig()
            rules.max_new_tokens = 1
            rules.apply_chat_template = False
            rules.structured_output_config = structured
            try:
                self._pipeline.generate(self._tensor, rules)
            except RuntimeError as error:
                raise InvalidValue(
                    f"the form asked of the answer cannot be used: {said(error)}", param="response_format"
                ) from None
            self._good[key] = None
            if len(self._good) > KEPT:
                self._good.popitem(last=False)
        self._good.move_to_end(key)
        return structured


def said(error: BaseException) -> str:
    """The library's message without the time, the source file and the check that it begins with."""
    text = re.sub(r"^.*?\.(?:cc|cpp|hpp|h):\d+:?", "", str(error), flags=re.DOTALL)
    return essence(text.strip() or str(error))


def _zeros(openvino: Any, vocabulary: int) -> Any:
    """Inputs and output of a language model, without anything in between."""
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
