"""Compiles a graph file to OpenVINO models, without telemetry, in the configured precision or one that is checked."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.backends.local.errors import shorten_message
from shoal.backends.local.options import EngineOptions, cpu_instructions, plan_threads
from shoal.backends.local.precision import PrecisionCheck, compare, limit_samples, to_comparable_rows
from shoal.backends.local.tensor_inputs import Port, check_inputs
from shoal.core.protocols import Tensors
from shoal.errors import ConfigError, MissingExtra, ModelFileError
from shoal.machine_limits import available_bytes, usable_cores
from shoal.run_once import once
from shoal.types import Array, compute_digest

Precision: TypeAlias = Literal["f32", "bf16"]

WIDE_BYTES = 256 * 2**20
WIDE_PART = 16
"""A graph has a wide lane up to this size, or up to this part of the free memory if that is more: the lane has its own
copy of the weights. With a BERT-base shape a text alone takes 0.54 (bf16) of the time of a stream on two idle cores."""

QUANTIZED_GROUP = 64
"""Numbers of a token that share a scale with int8 weights, which have groups of 64 too and allow no larger ones.
Measured with all-MiniLM-L6-v2 in f32 arithmetic: 2.2 to 2.3 times the speed of f32 at a mean cosine of 0.9993. 32: 1.9
to 2.2 times at 0.9995; 128, with one scale per column of the weights: 2.6 to 2.7 times at 0.9986."""

WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA that exclude all bf16 kernels."""

PLAIN_PRODUCTS = ("x86_64", "amd64")
"""Machines on which f32 matrix products are faster without an activation in them. Whole models of MiniLM's, T5's and
EmbeddingGemma's shape have 1.1 to 1.33 times the speed with AVX2, and with AVX512 1.02 to 1.37 times for texts of 16
tokens, 1.01 to 1.08 for 100 (`bench/activations.py`). In bf16 a product with its activation is the faster one."""

ACTIVATIONS = ("Elu", "Erf", "Gelu", "HSwish", "Mish", "Relu", "Sigmoid", "SoftPlus", "Swish", "Tanh")

KEEP = "keep_const_precision_0"
"""OpenVINO's mark of a constant that stays as it is. A version without it widens the constant."""

KERNELS_KEPT = 100_000
"""Kernels that each stream caches: more than the buckets can require, so that no kernel is compiled twice."""


def import_openvino() -> Any:
    """Import the `openvino` package. This is the only place where Shoal imports it.

    The import sends an event to the vendor's analytics from a child process, unless the telemetry package is absent. So
    that package is made absent first, and openvino uses its silent stub instead. Raises MissingExtra.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError:
        raise MissingExtra("the engine openvino", "local") from None
    warm_up()
    return openvino


@once
def warm_up() -> None:
    """Exercise once, in one thread, every part of OpenVINO's bindings that Shoal uses.

    The bindings keep Python objects in static C++ variables. A thread that initializes one holds the variable's guard
    and may release the GIL meanwhile. Another thread that reaches the same variable then waits for the guard while
    holding the GIL, which deadlocks the process.
    """
    import numpy as np
    import openvino

    for kind in (openvino.Type.i64, openvino.Type.i32, openvino.Type.boolean, openvino.Type.f16, openvino.Type.f32):
        kind.to_dtype()
    core = openvino.Core()
    core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    core.get_versions("CPU")
    request = core.compile_model(
        make_identity(openvino), "CPU", {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1}
    ).create_infer_request()
    request.set_callback(lambda _: None, None)
    for array in (np.zeros(1, np.float32), np.zeros(2, np.float32)):
        request.set_input_tensor(openvino.Tensor(array, shared_memory=True))
        request.start_async()
        request.wait()
        request.get_output_tensor().data.copy()
    request.infer([np.zeros(1, np.float32)], share_inputs=True)
    separate_activations(keep_half_tables(_make_product()))


def make_identity(openvino: Any) -> Any:
    """Return a model that returns its vector."""
    parameter = openvino.op.Parameter(openvino.Type.f32, openvino.PartialShape([-1]))
    return openvino.Model([openvino.op.Result(parameter.output(0))], [parameter], "identity")


def _make_product() -> Any:
    """Return a model with a table in half precision, a matrix product, a bias and an activation."""
    import numpy as np
    from openvino import Model
    from openvino import opset8 as ops

    table, one = ops.constant(np.ones((1, 1), np.float16)), ops.constant(np.ones((1, 1), np.float32))
    parameter = ops.parameter([-1], np.int64)
    rows = ops.convert(ops.gather(table, parameter, ops.constant(np.int64(0))), "f32")
    product = ops.matmul(rows, one, False, False)
    return Model([ops.relu(ops.add(product, one))], [parameter])


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A compiled graph. `narrow` runs `streams` batches in parallel; `wide`, if any, runs one on all `threads`."""

    narrow: Any
    wide: Any | None
    ports: tuple[Port, ...]
    outputs: tuple[str, ...]
    precision: Precision
    reason: str
    precision_check: PrecisionCheck | None
    streams: int
    threads: int
    version: str


@dataclass(frozen=True, slots=True)
class _PrecisionChoice:
    """A chosen precision. `model` is the one-stream model that the check compiled in that precision, if any."""

    precision: Precision
    reason: str
    check: PrecisionCheck | None = None
    model: Any | None = None


def compile_graph(graph: Path, options: EngineOptions) -> CompiledGraph:
    """Read, check and compile a graph. Takes seconds of CPU time.

    Raises ModelFileError, ConfigError (bf16 on a processor without it) and MissingExtra.
    """
    openvino = import_openvino()
    core = openvino.Core()
    try:
        model = core.read_model(str(graph))
        ports = tuple(_to_port(node) for node in model.inputs)
        streams, threads = plan_threads(options.streams, options.threads, usable_cores())
        compiler = _Compiler(core, model, threads)
        choice = _choose_precision(compiler, ports, options, _graph_bytes(graph))
        one = choice.model
        narrow = one if one and streams == 1 else compiler.compile(choice.precision, streams)
        wide = None
        streams = narrow.get_property("NUM_STREAMS")  # fewer than asked for where the processor has fewer cores
        if streams > 1 and fits_wide(_graph_bytes(graph)):
            wide = one or compiler.compile(choice.precision, 1)
    except RuntimeError as error:
        raise ModelFileError(
            f"OpenVINO cannot load this graph: {shorten_message(str(error))}; convert the model again", file=graph.name
        ) from error
    release_pages(graph.with_name(f"{graph.name}_data"))
    return CompiledGraph(
        narrow=narrow,
        wide=wide,
        ports=ports,
        outputs=compiler.outputs,
        precision=choice.precision,
        reason=choice.reason,
        precision_check=choice.check,
        streams=streams,
        threads=narrow.get_property("INFERENCE_NUM_THREADS"),
        version=openvino.__version__,
    )


class _Compiler:
    """Compiles one graph. Its models share one copy of the graph file's contents, but each packs its own weights."""

    def __init__(self, core: Any, model: Any, threads: int) -> None:
        self.core = core
        self.outputs = output_names(model)
        keep_half_tables(model)
        self._models = {"bf16": model, "f32": separate_activations(model.clone())}
        self._threads = threads

    def compile(self, precision: Precision, streams: int) -> Any:
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": self._threads,
            # the event loop, the tokenizer and other models share the cores: a pinned thread cannot move out of their
            # way
            "ENABLE_CPU_PINNING": False,
            "CPU_RUNTIME_CACHE_CAPACITY": KERNELS_KEPT,
            # int8 weights are multiplied by int8 inputs; each group of a token's numbers has its own scale
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": QUANTIZED_GROUP,
        }
        return self.core.compile_model(self._models[precision], "CPU", settings)


def keep_half_tables(model: Any) -> Any:
    """Keep OpenVINO from widening tables in half precision of which the graph widens the rows that it reads: each lane
    would have a table in f32 of its own. Changes the model and returns it."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather" or not _is_constant(node.input_value(0), "f16"):
            continue
        if all(each.get_node().get_type_name() == "Convert" for each in node.output(0).get_target_inputs()):
            node.input_value(0).get_node().get_rt_info()[KEEP] = True
    return model


def separate_activations(model: Any) -> Any:
    """Keep OpenVINO from fusing activations into f32 matrix products, by adding a zero to what they read that it does
    not know to be one. Changes the model and returns it.

    A product without an activation takes a faster kernel, which packs its weights once for inputs of all shapes.
    """
    if platform.machine().lower() not in PLAIN_PRODUCTS:
        return model
    import numpy as np
    from openvino import opset8 as ops

    nothing = ops.constant(np.int64(0))
    rows = ops.gather(ops.shape_of(model.inputs[0].get_node()), nothing, nothing)
    never = ops.less(rows, nothing)
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or not _is_constant(node.input_value(1), "f32", "f16"):
            continue
        product = node.output(0)
        readers = [each.get_node() for each in product.get_target_inputs()]
        if len(readers) == 1 and readers[0].get_type_name() == "Add" and _reads_constant(readers[0]):
            product = readers[0].output(0)
        targets = [each for each in product.get_target_inputs() if each.get_node().get_type_name() != "Result"]
        if any(_is_activation(each.get_node()) for each in targets):
            zero = ops.convert(never, product.get_element_type().get_type_name())
            shifted = ops.add(product, zero).output(0)
            for each in targets:
                each.replace_source_output(shifted)
    return model


def _is_activation(node: Any) -> bool:
    """Whether a node is an activation, or the first part of one that is spelled out."""
    kind = node.get_type_name()
    return kind in ACTIVATIONS or (kind in ("Multiply", "Divide", "Power") and _reads_constant(node))


def _reads_constant(node: Any) -> bool:
    return any(_is_constant(each) for each in node.input_values())


def _is_constant(value: Any, *types: str) -> bool:
    """Whether a value is a constant of one of the types (none: of any), or one that is only widened."""
    source = value.get_node()
    if source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return source.get_type_name() == "Constant" and (not types or source.get_element_type().get_type_name() in types)


def _choose_precision(
    compiler: _Compiler, ports: tuple[Port, ...], options: EngineOptions, size: int
) -> _PrecisionChoice:
    native = has_bf16(compiler.core)
    if options.precision == "bf16" and not native:
        raise ConfigError("this processor has no bf16 arithmetic; use precision f32 or auto", param="precision")
    if options.precision == "int8":
        return _PrecisionChoice("bf16" if native else "f32", "int8 weights")
    if options.precision == "fp16":
        return _PrecisionChoice("f32", "fp16 weights")
    if options.precision != "auto":
        return _PrecisionChoice(options.precision, "as configured")
    if not native:
        return _PrecisionChoice("f32", "the processor has no bf16 arithmetic")
    if not options.samples:
        return _PrecisionChoice("f32", "no samples for the bf16 check")
    key = _cache_key(compiler.core, options.samples)
    if options.precision_check is not None and options.precision_check.key == key:
        return _PrecisionChoice(
            _pick_precision(options.precision_check), options.precision_check.reason, options.precision_check
        )
    models: dict[Precision, Any] = {"f32": compiler.compile("f32", 1), "bf16": compiler.compile("bf16", 1)}
    samples = limit_samples(options.samples, size)
    exact, fast = (_run_samples(model, compiler.outputs, ports, samples, options) for model in models.values())
    found = PrecisionCheck(key, figures=compare(exact, fast, options.spec))
    return _PrecisionChoice(_pick_precision(found), found.reason, found, models[_pick_precision(found)])


def output_names(model: Any) -> tuple[str, ...]:
    """Return the names that the graph gives to its outputs. Versions before 2025.4 also list the names of the nodes
    behind them, in any order. Only the output's own node has the name of the output."""
    own = [(output.get_node().get_friendly_name().partition("/sink_port")[0], output) for output in model.outputs]
    return tuple(name if name in output.get_names() else output.get_any_name() for name, output in own)


def has_bf16(core: Any) -> bool:
    """Return whether bf16 is fast here. OpenVINO reports the processor's features even if an environment variable
    limits its kernels to an older processor; it then emulates bf16, forty times slower."""
    held = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") and held not in WITHOUT_BF16


def _pick_precision(found: PrecisionCheck) -> Precision:
    return "bf16" if found.agrees else "f32"


def _cache_key(core: Any, samples: Sequence[Tensors]) -> str:
    versions = core.get_versions("CPU")["CPU"].build_number
    processor = core.get_property("CPU", "FULL_DEVICE_NAME")
    return f"openvino {versions}; {processor}; {cpu_instructions()}; samples {compute_digest(samples)}"


def _run_samples(
    model: Any, outputs: Sequence[str], ports: tuple[Port, ...], samples: Sequence[Tensors], options: EngineOptions
) -> list[Mapping[str, Array]]:
    """Run the samples and return the outputs for comparison. Outputs are named by position, because fused nodes add
    their names to an output's own."""
    request = model.create_infer_request()
    rows: list[Mapping[str, Array]] = []
    for sample in samples:
        feeds = check_inputs(sample, ports, options.max_length)
        answers = request.infer(feeds, share_inputs=True)
        named = {name: array.copy() for name, array in zip(outputs, answers.values(), strict=True)}
        rows.append(to_comparable_rows(named, feeds, options.spec))
    return rows


def _to_port(node: Any) -> Port:
    import numpy as np

    shape = tuple(None if axis.is_dynamic else axis.get_length() for axis in node.get_partial_shape())
    return Port(node.get_any_name(), np.dtype(node.get_element_type().to_dtype()), shape)


def release_pages(file: Path) -> None:
    """Drop the pages of a mapped, unchanged file from this process's memory, on Linux. Compiling reads all weights, but
    of those in the file serving needs only rows of tables, which come back from the system's cache."""
    if sys.platform != "linux" or not file.is_file():
        return
    libc, path = ctypes.CDLL(None), str(file.resolve())
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, *_, mapped = line.split(maxsplit=5)
        if mapped == path and "w" not in access:
            start, end = (int(each, 16) for each in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def fits_wide(graph_bytes: int) -> bool:
    return graph_bytes <= max(WIDE_BYTES, available_bytes() // WIDE_PART)


def _graph_bytes(graph: Path) -> int:
    """Return the size of a graph with the weights beside it (`model.onnx_data`)."""
    return sum(path.stat().st_size for path in graph.parent.glob(graph.name + "*"))
