"""From a graph's file to compiled OpenVINO models: quiet, in the precision asked for or found to agree."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.backends._errors import essence
from shoal.backends._options import Checked, EngineOptions, layout, usable_cores
from shoal.backends._ports import Port, checked, least_cosine, rows_of, score_difference
from shoal.core.protocols import Tensors
from shoal.errors import ConfigError, MissingExtra, ModelFileError
from shoal.types import Array, digest_of

Precision: TypeAlias = Literal["f32", "bf16"]

MIN_COSINE = 0.9999
"""Least cosine of a bf16 row to its f32 row at which `auto` takes bf16."""

MAX_DIFFERENCE = 0.005
"""Largest difference of a score, as `score_difference` measures it, at which `auto` takes bf16: a cosine says nothing
of one logit, while so much of the range that scores span changes few orders and no decision that is clear."""

WIDE_MOST_BYTES = 256 * 2**20
"""Above this size of graph the wide lane's own copy of the weights costs more memory than a lone user's latency is
worth."""

QUANTIZED_GROUP = 128
"""Numbers of a token that share a scale, where weights are int8: measured with all-MiniLM-L6-v2, 1.3 times the speed of
bf16 at a mean cosine of 0.9988 to f32; 32 is as slow as bf16, 384 a tenth faster at twice the error."""

KERNELS_KEPT = 100_000
"""Kernels that each stream keeps: more than the buckets can ask for, so that none is ever made twice."""


def runtime() -> Any:
    """The `openvino` package. The only place where Shoal imports it.

    Importing it sends an event to its vendor's analytics, from a child process, unless the package that sends is
    absent; so that one is made absent first, and openvino uses the silent stand-in that it has for this case.

    Raises MissingExtra.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError:
        raise MissingExtra("the engine openvino", "local") from None
    return openvino


@dataclass(frozen=True, slots=True)
class Compiled:
    """`narrow` runs `streams` batches side by side; `wide`, if any, one on all `threads`."""

    narrow: Any
    wide: Any | None
    ports: tuple[Port, ...]
    outputs: tuple[str, ...]
    precision: Precision
    reason: str
    checked: Checked | None
    streams: int
    threads: int
    version: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """`model` is the compiled one-stream model that the check left over, in the precision it chose."""

    precision: Precision
    reason: str
    checked: Checked | None = None
    model: Any | None = None


def compile_graph(graph: Path, options: EngineOptions) -> Compiled:
    """Read, check and compile; takes seconds of CPU.

    Raises ModelFileError, ConfigError (bf16 on a processor without it), MissingExtra.
    """
    openvino = runtime()
    core = openvino.Core()
    try:
        model = core.read_model(str(graph))
        ports = tuple(_port(given) for given in model.inputs)
        streams, threads = layout(options.streams, options.threads, usable_cores())
        compiler = _Compiler(core, model, threads)
        choice = _choose(compiler, ports, options)
        one = choice.model
        if streams > 1:
            narrow = compiler.compile(choice.precision, streams)
            wide = (one or compiler.compile(choice.precision, 1)) if _bytes(graph) <= WIDE_MOST_BYTES else None
        else:
            narrow, wide = one or compiler.compile(choice.precision, 1), None
    except RuntimeError as error:
        raise ModelFileError(
            f"OpenVINO cannot load this graph: {essence(str(error))}; convert the model again", file=graph.name
        ) from error
    return Compiled(
        narrow=narrow,
        wide=wide,
        ports=ports,
        outputs=tuple(output.get_any_name() for output in model.outputs),
        precision=choice.precision,
        reason=choice.reason,
        checked=choice.checked,
        streams=streams,
        threads=threads,
        version=openvino.__version__,
    )


class _Compiler:
    """Models compiled by it share one copy of what the graph's file holds, but each packs its own weights."""

    def __init__(self, core: Any, model: Any, threads: int) -> None:
        self.core = core
        self._model = model
        self._threads = threads

    def compile(self, precision: Precision, streams: int) -> Any:
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": self._threads,
            # the event loop, the tokenizer and other models share the cores: a pinned thread cannot step aside
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": KERNELS_KEPT,
            # weights in int8 are multiplied by inputs in int8, each group of a token's numbers with a scale of its own
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": QUANTIZED_GROUP,
        }
        return self.core.compile_model(self._model, "CPU", settings)


def _choose(compiler: _Compiler, ports: tuple[Port, ...], options: EngineOptions) -> _Choice:
    native = "BF16" in compiler.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if options.precision == "bf16" and not native:
        raise ConfigError("this processor has no bf16 arithmetic; use precision f32 or auto", param="precision")
    if options.precision == "int8":
        return _Choice("bf16" if native else "f32", "weights in int8")
    if options.precision == "fp16":
        return _Choice("f32", "weights in fp16")
    if options.precision != "auto":
        return _Choice(options.precision, "as configured")
    if not native:
        return _Choice("f32", "the processor has no bf16 arithmetic")
    if not options.samples:
        return _Choice("f32", "no samples to check bf16 with")
    key = _key(compiler.core, options.samples)
    if options.checked is not None and options.checked.key == key:
        return _Choice(*_verdict(options.checked, options), options.checked)
    models: dict[Precision, Any] = {"f32": compiler.compile("f32", 1), "bf16": compiler.compile("bf16", 1)}
    exact, fast = (_rows(model, ports, options) for model in models.values())
    score = options.spec.score if options.spec else None
    if score is None:
        found = Checked(key, min_cosine=least_cosine(exact, fast))
    else:
        found = Checked(key, max_difference=score_difference(exact, fast, score.activation))
    precision, reason = _verdict(found, options)
    return _Choice(precision, reason, found, models[precision])


def _verdict(found: Checked, options: EngineOptions) -> tuple[Precision, str]:
    if options.spec is not None and options.spec.score is not None:
        figure = f"largest difference of bf16 scores to f32 {found.max_difference:.6f}"
        if found.max_difference <= MAX_DIFFERENCE:
            return "bf16", f"{figure} <= {MAX_DIFFERENCE}"
        return "f32", f"{figure} > {MAX_DIFFERENCE}"
    figure = f"least cosine of bf16 to f32 {found.min_cosine:.6f}"
    if found.min_cosine >= MIN_COSINE:
        return "bf16", f"{figure} >= {MIN_COSINE}"
    return "f32", f"{figure} < {MIN_COSINE}"


def _key(core: Any, samples: Sequence[Tensors]) -> str:
    versions = core.get_versions("CPU")["CPU"].build_number
    arithmetic = ",".join(sorted(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")))
    processor = core.get_property("CPU", "FULL_DEVICE_NAME")
    return f"openvino {versions}; {processor}; {arithmetic}; samples {digest_of(samples)}"


def _rows(model: Any, ports: tuple[Port, ...], options: EngineOptions) -> list[Array]:
    """What the model answers for the samples, to be compared."""
    request = model.create_infer_request()
    rows: list[Array] = []
    for sample in options.samples:
        feeds = checked(sample, ports, options.max_length)
        answers = request.infer(feeds, share_inputs=True)
        named = {output.get_any_name(): array.copy() for output, array in answers.items()}
        rows.extend(rows_of(named, feeds, options.spec))
    return rows


def _port(given: Any) -> Port:
    import numpy as np

    shape = tuple(None if axis.is_dynamic else axis.get_length() for axis in given.get_partial_shape())
    return Port(given.get_any_name(), np.dtype(given.get_element_type().to_dtype()), shape)


def _bytes(graph: Path) -> int:
    """Size of a graph with the weights that lie beside it (`model.onnx_data`)."""
    return sum(path.stat().st_size for path in graph.parent.glob(graph.name + "*"))
