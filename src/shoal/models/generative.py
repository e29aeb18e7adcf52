"""Read the files of language models and collect the settings that serving them needs in one folder."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.gguf import Gguf, read_gguf, write_settings
from shoal.models.gguf_support import check as check_support
from shoal.models.manifest import GenerationSpec
from shoal.models.rerankers import MARK
from shoal.models.sources.select import IR, find_generative_graph
from shoal.models.tokenizer_file import TOKENIZER

SETTINGS = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
"""Files of a model's folder that a chat pipeline reads."""

TEMPLATES = "additional_chat_templates"
"""Where transformers keeps templates other than the default one, such as tool_use.jinja."""

_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_MOST_TOKENS = 2**31 - 1
"""Upper bound of token ids, vocabularies and contexts."""
_MOST_WEIGHTS = 2**50
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "model_max_length")


class GenerativeModel(NamedTuple):
    """A language model that is ready to serve. `graph`: path in the model's folder."""

    spec: GenerationSpec
    graph: str
    parameters: int
    text: str


def find_graph(folder: Path) -> tuple[str, ...]:
    """Return the files with the graph of a language model in this folder; empty if there is none that can be run."""
    files = (*folder.glob("*"), *folder.glob("*/*.gguf"))
    return find_generative_graph({path.relative_to(folder).as_posix() for path in files if path.is_file()})


def is_causal(folder: Path) -> bool:
    """Whether config.json names a generative architecture, and no other file makes it an embedder or reranker."""
    config = read_object(folder, "config.json")
    names = config.data.get("architectures") if config else None
    if any((folder / name).is_file() for name in ("modules.json", MARK)) or not isinstance(names, list):
        return False
    return any(isinstance(name, str) and name.endswith(_CAUSAL) for name in names)


def prepare_generative(folder: Path, target: Path, *, place: str = "") -> GenerativeModel:
    """Check that the graph in `folder` is complete, and collect the settings in the folder `target`.

    Raises ModelFileError, naming the file, for a model that cannot be run.
    """
    graph = find_graph(folder)
    copy_settings(folder, target)
    if graph == IR:
        parameters = check_ir(folder)
        text = "the model's own OpenVINO graph"
        cache: tuple[tuple[int, int], ...] = ()
    else:
        gguf: Gguf = read_gguf(folder / graph[0])
        check_support(gguf)
        write_settings(gguf, target)
        parameters, cache = gguf.parameters, gguf.cache_heads
        text = f"the model's own GGUF ({gguf.architecture})"
    if not (target / TOKENIZER).is_file():
        raise ModelFileError(
            "is missing: load the model's tokenizer with transformers and save it again, which writes this file",
            file=TOKENIZER,
        )
    config = read_object(target, "config.json") or JsonFile("config.json", {})
    architectures = config.data.get("architectures")
    spec = GenerationSpec(
        format="ir" if graph == IR else "gguf",
        tokenizer=TOKENIZER,
        place=place,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        context_tokens=_context(config),
        vocab_size=_vocabulary(config),
        stop_ids=_stops(target),
        cache_heads=cache,
    )
    return GenerativeModel(spec, graph[0], parameters, text)


def copy_settings(folder: Path, target: Path) -> None:
    """Copy the `SETTINGS` in `folder` and additional chat templates, which are small; keep files that `target` already
    has."""
    more = (path.relative_to(folder).as_posix() for path in sorted((folder / TEMPLATES).glob("*.jinja")))
    for name in (*SETTINGS, *more):
        if (folder / name).is_file() and not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, target / name)


def check_ir(folder: Path) -> int:
    """Check that an OpenVINO graph is a language model's and that its weights are complete; return the number of
    parameters.

    Raises ModelFileError.
    """
    graph, weights = IR
    size = (folder / weights).stat().st_size
    parameters = needed = 0
    names: set[str] = set()
    kinds: set[str | None] = set()
    try:
        for _, element in ElementTree.iterparse(folder / graph):
            if element.tag == "port":
                names.update((element.get("names") or "").split(","))
            elif element.tag == "layer":
                kinds.add(element.get("type"))
                data = element.find("data") if element.get("type") == "Const" else None
                if data is not None:
                    parameters += prod(int(axis) for axis in (data.get("shape") or "").split(",") if axis.strip())
                    needed = max(needed, int(data.get("offset", 0)) + int(data.get("size", 0)))
                    if not 0 <= parameters <= _MOST_WEIGHTS:
                        raise ValueError(f"it has a shape {(data.get('shape') or '')[:60]}")
                element.clear()
    except (ElementTree.ParseError, ValueError) as error:
        raise ModelFileError(f"is not readable ({error}); fetch the model again", file=graph) from None
    if not {"input_ids", "logits"} <= names:
        raise ModelFileError(
            "is not a language model: it lacks input_ids or logits. For an embedding model, name the original "
            "repository, which has safetensors or ONNX",
            file=graph,
        )
    if "ReadValue" not in kinds:
        raise ModelFileError("is not stateful: export it again with `optimum-cli export openvino`", file=graph)
    if needed > size:
        raise ModelFileError(f"is truncated: it has {size} of {needed} bytes; fetch it again", file=weights)
    return parameters


def _context(config: JsonFile) -> int | None:
    """Return the maximum tokens of prompt and answer, by the first key that states it. Multimodal models nest the key
    one level deeper."""
    nested = config.data.get("text_config")
    for where in (config.data, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = where.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_TOKENS:
                return value  # some use 10**30 for "unlimited"
    return None


def _vocabulary(config: JsonFile) -> int:
    """Return the width of the logits, 0 if the file does not state it as a number."""
    key = "vocab_size"
    return config.integer(key, 0, most=_MOST_TOKENS) if isinstance(config.data.get(key), int) else 0


def _stops(folder: Path) -> tuple[int, ...]:
    """Return eos_token_id of generation_config.json, else of config.json: one id or several. Raises ModelFileError for
    an id beyond any vocabulary; ids below 0 are ignored."""
    for name in ("generation_config.json", "config.json"):
        config = read_object(folder, name)
        value: Any = config.data.get("eos_token_id") if config else None
        ids = value if isinstance(value, list) else [value]
        found = tuple(one for one in ids if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
        if config is not None and found and max(found) > _MOST_TOKENS:
            why = f"{max(found)} is not a token id: use the model's own {name}, or correct it"
            raise config.refuse("eos_token_id", why)
        if found:
            return found
    return ()
