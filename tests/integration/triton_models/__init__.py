"""Models of Triton's python backend that behave as a test needs; the modules beside this one are their `model.py`.

near_free   text -> embedding [1024], at next to no cost; see `near_free_vector`
tokens_in   input_ids, attention_mask -> token_embeddings [length, 16]; see `token_vectors`
slow        text (milliseconds) -> embedding [8], unless it is cancelled; notes what it saw
failing     text -> embedding [8]; words in the text make it fail, see the module
big         text (millions of bytes) -> embedding, so large
decoupled   text (a number) -> so many responses on one stream

Language models, the tensors being those of `tests.fakes.triton_llm`:

talker_KIND           text_input -> text_output, as its prompt says; see the module `talker`
talker_whole          of TensorRT-LLM's kind, that answers in one piece
talker_ensemble       an ensemble of Triton's own over `talker_trtllm`
talker_bls            a model of the python backend that calls `talker_trtllm`; see the module `bls`
talker_bare           a text is all that it takes; `talker_flow` is the same in pieces
llama                 input_ids -> output_ids; see the module; `llama_whole` answers in one piece
"""

from __future__ import annotations

import math
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from shoal.kserve.protocol_pb2 import ModelInstanceGroup
from shoal.pipelines.chat.vocabulary import Vocabulary
from shoal.types import Array
from tests.fakes.triton_llm import Kind, talker_config
from tests.fixtures.tiny_llama import VOCABULARY, write_tokenizer

_HERE = Path(__file__).parent
_TEXT = ("text", "TYPE_STRING", "[ 1 ]")


@dataclass(frozen=True, slots=True)
class TestModel:
    """One entry: tensors are (name, type, dims); `extra` is additional protobuf text of its configuration."""

    __test__ = False  # its name is for people, not for pytest

    inputs: tuple[tuple[str, str, str], ...] = (_TEXT,)
    outputs: tuple[tuple[str, str, str], ...] = (("embedding", "TYPE_FP32", "[ 8 ]"),)
    max_batch_size: int = 32
    extra: str = ""
    program: str = ""

    def config(self, name: str, notes: Path) -> str:
        lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {self.max_batch_size}"]
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            lines += [f'{kind} [ {{ name: "{n}" data_type: {t} dims: {d} }} ]' for n, t, d in tensors]
        lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
        lines.append(f'parameters {{ key: "notes" value: {{ string_value: "{notes}" }} }}')
        return "\n".join([*lines, self.extra, ""])


@dataclass(frozen=True, slots=True)
class LlmModel:
    """A language model of a kind. `parameters` are added to its configuration, `more` are additional inputs, `without`
    the missing ones. `over`: an ensemble of one step, which has no program."""

    kind: Kind
    program: str = "talker"
    decoupled: bool | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    over: str = ""
    more: str = ""
    without: Sequence[str] = ()

    def config(self, name: str, notes: Path) -> str:
        config = talker_config(self.kind, name, decoupled=self.decoupled, more=self.more, without=self.without)
        config.backend = "" if self.over else "python"
        config.platform = "ensemble" if self.over else ""
        if self.over:
            config.ClearField("model_transaction_policy")  # as TensorRT-LLM's omits it
            step = config.ensemble_scheduling.step.add(model_name=self.over, model_version=-1)
            step.input_map.update({each.name: each.name for each in config.input})
            step.output_map.update({each.name: each.name for each in config.output})
        else:
            config.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
        parameters = {"notes": str(notes), "kind": self.kind, **self.parameters}
        if self.program == "llama":
            parameters["pieces"] = _pieces()
        for key, text in parameters.items():
            config.parameters[key].string_value = text
        return text_format.MessageToString(config)


@cache
def _pieces() -> str:
    """The bytes of each token of the tiny tokenizer, as hex."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        vocabulary = Vocabulary(Path(folder), "tokenizer.json")
    return "-".join(vocabulary.data(token).hex() for token in range(vocabulary.size))


WEIGHTS = {"vocabulary": str(VOCABULARY), "seed": "7"}
BARE = ("max_tokens", "temperature")

MODELS: dict[str, TestModel | LlmModel] = {
    "near_free": TestModel(outputs=(("embedding", "TYPE_FP32", "[ 1024 ]"),), max_batch_size=256),
    "tokens_in": TestModel(
        inputs=(("input_ids", "TYPE_INT64", "[ -1 ]"), ("attention_mask", "TYPE_INT64", "[ -1 ]")),
        outputs=(("token_embeddings", "TYPE_FP32", "[ -1, 16 ]"),),
        max_batch_size=64,
    ),
    "slow": TestModel(),
    "failing": TestModel(extra="dynamic_batching { }"),
    "big": TestModel(outputs=(("embedding", "TYPE_FP32", "[ -1 ]"),), max_batch_size=0),
    "decoupled": TestModel(
        outputs=(("text_output", "TYPE_STRING", "[ 1 ]"),),
        max_batch_size=0,
        extra="model_transaction_policy { decoupled: true }",
    ),
    "talker_vllm": LlmModel("vllm"),
    "talker_trtllm": LlmModel("bls", more="stop? BOOL 1"),
    "talker_ensemble": LlmModel("bls", over="talker_trtllm"),
    "talker_bls": LlmModel("bls", "bls", parameters={"tensorrt_llm_model_name": "talker_trtllm"}),
    "talker_whole": LlmModel("ensemble", decoupled=False),
    "talker_gpt": LlmModel("gpt"),
    "talker_llmapi": LlmModel("llmapi"),
    "talker_text": LlmModel("text"),
    "talker_bare": LlmModel("text", without=BARE),
    "talker_flow": LlmModel("text", decoupled=True, without=BARE),
    "llama": LlmModel("tokens", "llama", parameters=WEIGHTS),
    "llama_whole": LlmModel("tokens", "llama", decoupled=False, parameters=WEIGHTS),
}


def write_models(repository: Path, notes: Path) -> None:
    """Write every model's entry. Models append a line to the file `notes` for each event that a test may check."""
    for name, model in MODELS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        if not (isinstance(model, LlmModel) and model.over):
            shutil.copyfile(_HERE / f"{model.program or name}.py", folder / "model.py")
        (repository / name / "config.pbtxt").write_text(model.config(name, notes))


def near_free_vector(text: str) -> Array:
    """The answer of `near_free` for a text: [1024] float32, ones after a first number that depends on the text."""
    vector = np.ones(1024, np.float32)
    vector[0] = zlib.crc32(text.encode()) % 1000
    return vector


def token_vectors(ids: list[int]) -> Array:
    """The answer of `tokens_in` for unmasked tokens: [length, 16] float32."""
    return np.array([[math.sin(number * (place + 1) / 7) for place in range(16)] for number in ids], np.float32)
