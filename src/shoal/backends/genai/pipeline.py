"""Opens the library's pipeline within its memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from shoal.backends.genai import memory
from shoal.backends.genai.grammar import GuideCompiler, clean_message
from shoal.backends.genai.messages import GenaiOptions, Opened
from shoal.backends.local.compile import has_bf16, import_openvino, make_identity
from shoal.backends.local.errors import engine_error
from shoal.errors import ConfigError, MissingExtra, ModelFileError, OutOfMemory
from shoal.machine_limits import available_bytes, usable_cores

GRAPH = "openvino_model.xml"
GIB = 2**30
SAMPLER_THREADS = 4
GROUP_PROPERTY = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
QUANTIZED_TOGETHER = 32
"""Group size if dynamic quantization is requested and neither the library nor the file has a default."""

_AUTHORS_GROUP = ["runtime_options", GROUP_PROPERTY]


@dataclass(slots=True)
class Pipeline:
    """An open model. `cb`: the ContinuousBatchingPipeline; `grammars`: None if the library does not know the model's
    vocabulary; `stop_ids`: tokens that end an answer by the model's files; `capacity`: tokens in the cache, 0 if
    unknown."""

    cb: Any
    openvino: Any
    genai: Any
    tokenizer: Any
    grammars: GuideCompiler | None
    stop_ids: frozenset[int]
    capacity: int
    facts: Opened

    def rules(self) -> Any:
        """Return a fresh copy of the model's GenerationConfig, with the stop tokens of its files."""
        rules = self.cb.get_config()
        rules.stop_token_ids = set(self.stop_ids)
        return rules

    def add(self, number: int, ids: tuple[int, ...], rules: Any) -> Any:
        """Add a request and return the library's handle. Raises RuntimeError for invalid rules."""
        return self.cb.add_request(number, self.openvino.Tensor(np.array([ids], np.int64)), rules)


def import_libraries() -> tuple[Any, Any]:
    """Return `openvino` and `openvino_genai`, with telemetry disabled. Raises MissingExtra."""
    try:
        openvino = import_openvino()
        return openvino, import_module("openvino_genai")
    except (MissingExtra, ImportError):
        raise MissingExtra("a language model on this machine", "llm") from None


def open_pipeline(path: Path, options: GenaiOptions) -> Pipeline:
    """Load a model and generate one token with it.

    Raises ModelFileError, ConfigError, OutOfMemory, MissingExtra.
    """
    openvino, genai = import_libraries()
    folder = path if path.is_dir() else path.parent
    try:
        state = _ModelLayout.read(openvino, path, options)
        threads = options.threads or usable_cores()
        precision = choose_precision(openvino, options, threads)
        kv_precision, group = cache_precision(options), quantization_group(openvino, state.group, options)
        scheduler, capacity = _build_scheduler(genai, state, options, kv_precision)
        properties = compile_properties(precision, threads, kv_precision, group)
        sampling = {"sampler_num_threads": min(threads, SAMPLER_THREADS)}
        cb = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties | sampling)
        tokenizer = cb.get_tokenizer()
        grammars = _build_grammars(openvino, genai, tokenizer, state.vocabulary)
        rules = cb.get_config()
        own = {rules.eos_token_id} if rules.eos_token_id >= 0 else set()
        pipeline = Pipeline(
            cb=cb,
            openvino=openvino,
            genai=genai,
            tokenizer=tokenizer,
            grammars=grammars,
            stop_ids=frozenset(own | rules.stop_token_ids | set(options.stop_ids)),
            capacity=capacity,
            facts=Opened(
                version=str(genai.__version__).partition("-")[0],
                precision=precision,
                kv_cache_precision=kv_precision,
                quantized_together=group,
                threads=threads,
                vocab_size=state.vocabulary,
                guided=grammars is not None,
                cache_tokens=capacity,
                cache_bytes=0,
            ),
        )
        return _make_first_token(pipeline)
    except RuntimeError as error:
        if isinstance(engine_error(error), OutOfMemory) or "more memory than available" in str(error):
            raise OutOfMemory(
                f"the model does not fit into memory ({clean_message(error)}); lower kv_cache_mb"
            ) from error
        name = GRAPH if path == folder else path.name
        raise ModelFileError(
            f"OpenVINO GenAI cannot load this model: {clean_message(error)}; choose another one, or export it again",
            file=name,
        ) from error


def choose_precision(openvino: Any, options: GenaiOptions, threads: int) -> Literal["f32", "bf16"]:
    """Return the precision that the graph is computed in. Raises ConfigError if bf16 is required and not possible.

    It takes two threads: on processors with AMX, OpenVINO 2026.4 divides the work of a layer between halves of them,
    and with one thread the process dies of a division by zero.
    """
    if options.precision == "f32":
        return "f32"
    if not has_bf16(openvino.Core()):
        why = "this processor has no bf16 arithmetic"
    elif count_threads(openvino, threads) < 2:
        why = "bf16 needs two threads and cores"
    else:
        return "bf16"
    if options.precision == "bf16":
        raise ConfigError(f"{why}; use precision f32 or auto", param="precision")
    return "f32"


def count_threads(openvino: Any, threads: int) -> int:
    """Return how many of `threads` the library uses: at most one for each physical core that is there."""
    compiled = openvino.Core().compile_model(make_identity(openvino), "CPU", {"INFERENCE_NUM_THREADS": threads})
    return int(compiled.get_property("INFERENCE_NUM_THREADS"))


def compile_properties(precision: str, threads: int, kv_precision: str, group: int) -> dict[str, Any]:
    """Return the properties with which OpenVINO compiles the graph. `kv_precision`: precision of the cache;
    `group`: group size of dynamic quantization.

    All properties that affect answers are explicit: by default the library caches keys and values in u8 and quantizes
    activations even if it computes in f32.
    """
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        # the event loop and other models share the cores, and a pinned thread cannot move to a free one
        "ENABLE_CPU_PINNING": False,
        "KV_CACHE_PRECISION": kv_precision,
        GROUP_PROPERTY: group,
    }


def _make_first_token(pipeline: Pipeline) -> Pipeline:
    """Generate a token, which allocates the memory for contexts, and return the pipeline."""
    rules = pipeline.rules()
    rules.max_new_tokens = 1
    pipeline.add(0, (0,), rules)
    while pipeline.cb.has_non_finished_requests():
        pipeline.cb.step()
    taken = pipeline.cb.get_metrics().cache_size_in_bytes
    pipeline.facts = msgspec.structs.replace(pipeline.facts, cache_bytes=taken)
    return pipeline


@dataclass(frozen=True, slots=True)
class _ModelLayout:
    """Facts in a model's file, read before loading. `heads`: (heads, width of a head) of each cached tensor; `group`:
    the group size of dynamic quantization that its author chose."""

    heads: tuple[tuple[int, int], ...]
    vocabulary: int
    group: int | None = None

    @classmethod
    def read(cls, openvino: Any, path: Path, options: GenaiOptions) -> _ModelLayout:
        if not path.is_dir():
            return cls(options.cache_heads, options.vocab_size)
        model = openvino.Core().read_model(str(path / GRAPH))
        width = model.output("logits").get_partial_shape()[-1]
        heads = []
        for sink in model.get_sinks():
            shape = sink.get_output_partial_shape(0)
            if shape.rank.is_static and len(shape) == 4 and shape[1].is_static and shape[3].is_static:
                heads.append((shape[1].get_length(), shape[3].get_length()))
        return cls(
            heads=tuple(heads) if len(heads) == len(model.get_sinks()) else (),
            vocabulary=width.get_length() if width.is_static else options.vocab_size,
            group=int(model.get_rt_info(_AUTHORS_GROUP).value) if model.has_rt_info(_AUTHORS_GROUP) else None,
        )


def cache_precision(options: GenaiOptions) -> str:
    """Return the precision of cached keys and values: that of the computation, by default 16 bits."""
    if options.kv_cache_precision != "auto":
        return options.kv_cache_precision
    return "f32" if options.precision == "f32" else "f16"


def quantization_group(openvino: Any, authors: int | None, options: GenaiOptions) -> int:
    """Return the number of activations that share an 8-bit scale, 0 for none quantized. `authors`: the file's value."""
    if options.dynamic_quantization == "off" or (options.dynamic_quantization == "auto" and options.precision == "f32"):
        return 0
    default = authors if authors is not None else int(openvino.Core().get_property("CPU", GROUP_PROPERTY))
    return default if options.dynamic_quantization == "auto" else default or QUANTIZED_TOGETHER


def _build_scheduler(genai: Any, state: _ModelLayout, options: GenaiOptions, kv_precision: str) -> tuple[Any, int]:
    """Return the library's SchedulerConfig and the capacity of its cache in tokens."""
    config = genai.SchedulerConfig()
    config.max_num_seqs = options.max_streams
    config.enable_prefix_caching = options.prefix_caching
    cache_bytes = memory.cache_budget(options.kv_cache_mb, available_bytes())
    if not state.heads:
        # The block size is unknown; the cache size in bytes can only be set in whole GiB.
        config.cache_size = max(1, round(cache_bytes / GIB))
        return config, 0
    count = memory.count_blocks(
        cache_bytes,
        memory.block_bytes(state.heads, kv_precision),
        explicit=bool(options.kv_cache_mb),
        context_tokens=options.context_tokens,
        streams=options.max_streams,
    )
    config.num_kv_blocks = count
    return config, count * memory.BLOCK_TOKENS


def _build_grammars(openvino: Any, genai: Any, tokenizer: Any, vocabulary: int) -> GuideCompiler | None:
    try:
        known = bool(vocabulary and tokenizer.get_vocab())
    except RuntimeError:  # no detokenizer in the folder, or one without a readable vocabulary
        return None
    return GuideCompiler(openvino, genai, tokenizer, vocabulary) if known else None
