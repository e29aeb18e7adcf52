"""Create variants of a stored graph with smaller weights on this machine, and measure how much they deviate.

int8: each weight of a matrix product is one int8 number, with a scale per output column, or per column and group of
rows: smaller groups are more exact, but not every engine multiplies them as int8. Large tables have a scale per row.
All are symmetric, so without offsets. Engines quantize the inputs on the fly, per token, so a text's vector does not
depend on its neighbors (as a scale over a whole batch would). No calibration texts are needed. fp16: the same tensors
in half precision, widened when they are read: half of the disk space, no speedup.

A variant is another approximation of the same model. Operators choose it explicitly; `auto` never selects it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from shoal.decoding import converter
from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.convert.graphs.builder import INLINE_BYTES
from shoal.models.convert.verify import Run, row_cosines
from shoal.models.manifest import FileFacts, sha256
from shoal.models.progress import Stop
from shoal.models.store import Store, StoredModel
from shoal.specs import TextSpec
from shoal.types import Array, compute_digest

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

Variant: TypeAlias = Literal["int8", "fp16"]

VARIANTS: tuple[Variant, ...] = ("int8", "fp16")
GROUP_ROWS = 64
"""Rows of a matrix that share a scale in the grouped form of int8. Measured with all-MiniLM-L6-v2 on OpenVINO, weights
only: a mean cosine of 0.9998 to f32, 0.9994 with one scale per column; 32 rows are no more exact."""

FORMS: tuple[tuple[Variant, bool], ...] = (("int8", False), ("int8", True), ("fp16", False))
"""Every (variant, grouped) that may lie beside a graph."""

LEAST_MEAN = {"int8": 0.99, "fp16": 0.9999}
"""Minimum mean cosine to the f32 graph for a variant to serve. For int8, 0.9993 was measured for all-MiniLM-L6-v2. A
model below this does not survive the rounding of its weights, and its vectors are useless."""

TABLE_ROWS = 2048
"""A table with fewer rows (positions, token types) is not worth rounding."""

LARGEST_HALF = 65504.0
_FLOAT, _HALF, _DEQUANTIZE_OPSET = 1, 10, 13
_UNLISTED_IR = 4
"""Older versions of the format require every weight to be listed as an input too."""
_TIMED = 5


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """A variant compared with the f32 graph over the sample texts, on this machine.

    `key`: engine, graph and samples that it applies to. `min_cosine`, `mean_cosine`: over rows, for a model with
    vectors, of the kind of vectors that deviates most; `means` has the mean per output. Vectors of pooled tokens are
    reported there but not judged, since only the pooled vector is used. `max_difference`: for a model that scores, the
    largest difference of a logit, relative to the logits' range. `speed`: the f32 graph's time over the variant's, by
    batch ("8x32"). `bytes`: size of its files.
    """

    key: str
    min_cosine: float | None = None
    mean_cosine: float | None = None
    means: dict[str, float] = {}
    max_difference: float | None = None
    speed: dict[str, float] = {}
    bytes: int = 0


_PARITY = converter(Parity)
_FILES = converter(dict[str, FileFacts])


def variant_path(stored: StoredModel, variant: Variant, *, grouped: bool = False) -> Path:
    """Return the path of a stored model's variant, existing or not: beside the graph."""
    return stored.graph.with_name(f"{stored.graph.stem}.{_form(variant, grouped)}{stored.graph.suffix}")


def make_variant(
    stored: StoredModel, variant: Variant, *, store: Store, grouped: bool = False, stop: Stop | None = None
) -> Path:
    """Return the variant of a stored model; write it if it is missing or damaged. Takes seconds, needs no engine.

    `grouped`: int8 with a scale per group of `GROUP_ROWS` rows, for engines that multiply such weights. It appears
    complete or not at all, and equal graphs give equal bytes; of several processes, one makes it. Raises ModelFileError
    for a graph that has nothing to make smaller, is too old or not valid; Cancelled; SourceError and OSError of the
    disk.
    """
    path = variant_path(stored, variant, grouped=grouped)
    note = f"{_note(variant, grouped)}_files"
    if stored.graph.suffix != ".onnx":
        raise ModelFileError(f"only ONNX graphs have {variant} variants; use precision auto", file=stored.graph.name)
    if _is_whole(stored, path, note, store):
        return path
    with store.adding(stored, stop) as place:
        # Another process may have made it while this one waited for the lock.
        if _is_whole(stored, path, note, store):
            return path
        made = place / path.name
        write_variant(stored.graph, made, variant, grouped=grouped, stop=stop)
        facts = {}
        # Weights first, so that a reader of the graph finds them.
        for file in sorted(place.iterdir(), key=lambda each: each == made):
            stat = file.stat()
            facts[file.name] = msgspec.to_builtins(FileFacts(sha256(file), stat.st_size, stat.st_mtime_ns))
            _flush(file)
            os.replace(file, path.parent / file.name)
        _flush(path.parent)
        store.note(stored, note, facts)
    return path


def _is_whole(stored: StoredModel, path: Path, note: str, store: Store) -> bool:
    """Whether the files of the variant at `path` are those in the store's `note`: by size and time, or by content."""
    try:
        facts = _FILES(store.notes(stored).get(note))
        for name, fact in facts.items():
            file = path.with_name(name)
            stat = file.stat()
            if stat.st_size != fact.size or (stat.st_mtime_ns != fact.mtime and sha256(file) != fact.sha256):
                return False
    except (FileNotFoundError, ValueError):  # an invalid name, or a note that is not valid
        return False
    return path.name in facts


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's names, are on disk, so that a power cut leaves nothing incomplete."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_variant(
    graph: Path, target: Path, variant: Variant, *, grouped: bool = False, stop: Stop | None = None
) -> None:
    """Write `target` from the f32 `graph`, tensor by tensor. Raises the errors of `make_variant`."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(graph), load_external_data=False)
        opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
        if opset < _DEQUANTIZE_OPSET:
            raise ModelFileError(
                f"opset {opset} does not support {variant} weights, which need opset {_DEQUANTIZE_OPSET}; use "
                "precision auto",
                file=graph.name,
            )
        _GraphCompressor(model, graph, variant, stop or Stop(), GROUP_ROWS if grouped else 0).run()
        if model.ByteSize() > INLINE_BYTES:
            onnx.save(
                model, str(target), save_as_external_data=True, location=f"{target.name}_data", size_threshold=1024
            )
        else:
            target.write_bytes(model.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(target))
    except (DecodeError, onnx.checker.ValidationError, ValueError, TypeError) as error:  # onnx: invalid graphs
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(
            f"cannot be converted to {variant} weights ({reason}); use precision auto", file=graph.name
        ) from error


class _GraphCompressor:
    """Replaces the weights of one graph, in place. `group`: rows of a matrix that share a scale (0: all)."""

    def __init__(self, model: ModelProto, graph: Path, variant: Variant, stop: Stop, group: int) -> None:
        self._model = model
        self._body = model.graph
        self._file = graph
        self._variant = variant
        self._group = group
        self._stop = stop
        self._nodes: list[NodeProto] = []
        self._tensors: list[TensorProto] = []
        self._replaced_names: set[str] = set()

    def run(self) -> None:
        products, tables = self._choose_tensors()
        for tensor in self._body.initializer:
            self._stop.check()
            if tensor.name in products | tables:
                self._compress(tensor, table=tensor.name in tables)
            else:
                self._keep(tensor)
        if not self._replaced_names:
            raise ModelFileError(
                f"has no float32 weights that {self._variant} would reduce; use precision auto",
                file=self._file.name,
            )
        widened = [*self._nodes]
        for node in self._body.node:
            widened.extend(self._read(node))
        del self._body.initializer[:], self._body.node[:]
        self._body.initializer.extend(self._tensors)
        self._body.node.extend(widened)
        # A weight may be listed as an input with a default value; its replacement is not.
        taken = [value for value in self._body.input if value.name not in self._replaced_names]
        del self._body.input[:]
        self._body.input.extend(taken)
        self._model.ir_version = max(self._model.ir_version, _UNLISTED_IR)

    def _choose_tensors(self) -> tuple[set[str], set[str]]:
        """Return the names of matrices in products, and of tables in look-ups; tensors with any other use are left
        alone."""
        matrices = {
            tensor.name: tensor.dims
            for tensor in self._body.initializer
            if tensor.data_type == _FLOAT and len(tensor.dims) == 2 and all(tensor.dims)
        }
        products, tables = set(), set()
        others = {*_read_inside(self._body), *(value.name for value in self._body.output)}
        for node in self._body.node:
            for place, name in enumerate(node.input):
                if name not in matrices:
                    continue
                if node.op_type == "MatMul" and place == 1:
                    products.add(name)
                elif node.op_type == "Gather" and place == 0 and not _axis(node):
                    tables.add(name)
                else:
                    others.add(name)
        big = {name for name in tables if matrices[name][0] >= TABLE_ROWS}
        return products - tables - others, big - products - others

    def _compress(self, tensor: TensorProto, *, table: bool) -> None:
        """Replace a matrix, unless its values cannot be rounded: NaN, infinite or too large ones."""
        from onnx import helper

        name, values = tensor.name, self._load(tensor)
        if self._variant == "fp16":
            if np.abs(values).max(initial=0.0) > LARGEST_HALF:  # it would become infinite
                self._add(name, values)
                return
            self._add(f"{name}/fp16", values.astype(np.float16))
            widen = helper.make_node("Cast", [f"{name}/fp16"], [name], to=_FLOAT)
        else:
            if not np.isfinite(values).all():
                self._add(name, values)
                return
            if self._group and not table and not values.shape[0] % self._group:
                self._compress_in_groups(name, values)
                return
            numbers, scales = quantize(values, axis=1 if table else 0)
            self._add(f"{name}/int8", numbers)
            self._add(f"{name}/scale", scales[:, None] if table else scales)
            widen = helper.make_node("DequantizeLinear", [f"{name}/int8", f"{name}/scale"], [name], axis=1)
        self._replaced_names.add(name)
        if not table:
            self._nodes.append(widen)

    def _compress_in_groups(self, name: str, values: Array) -> None:
        """Replace a matrix [rows, columns] by numbers [groups, rows of a group, columns]: the pattern in which OpenVINO
        recognizes compressed weights."""
        from onnx import helper

        numbers, scales = quantize(values.reshape(-1, self._group, values.shape[1]), axis=1)
        self._add(f"{name}/int8", numbers)
        self._add(f"{name}/scale", scales[:, None])
        self._add(f"{name}/shape", np.array(values.shape, np.int64))
        self._replaced_names.add(name)
        self._nodes += [
            helper.make_node("Cast", [f"{name}/int8"], [f"{name}/float"], to=_FLOAT),
            helper.make_node("Mul", [f"{name}/float", f"{name}/scale"], [f"{name}/groups"]),
            helper.make_node("Reshape", [f"{name}/groups", f"{name}/shape"], [name]),
        ]

    def _read(self, node: NodeProto) -> list[NodeProto]:
        """Replace a look-up in a replaced table by nodes that widen only the rows read; return any other node
        unchanged."""
        from onnx import helper

        if node.op_type != "Gather" or node.input[0] not in self._replaced_names:
            return [node]
        table, ids, out = node.input[0], node.input[1], node.output[0]
        if self._variant == "fp16":
            return [
                helper.make_node("Gather", [f"{table}/fp16", ids], [f"{out}/fp16"]),
                helper.make_node("Cast", [f"{out}/fp16"], [out], to=_FLOAT),
            ]
        return [
            helper.make_node("Gather", [f"{table}/int8", ids], [f"{out}/int8"]),
            helper.make_node("Cast", [f"{out}/int8"], [f"{out}/float"], to=_FLOAT),
            helper.make_node("Gather", [f"{table}/scale", ids], [f"{out}/scale"]),
            helper.make_node("Mul", [f"{out}/float", f"{out}/scale"], [out]),
        ]

    def _keep(self, tensor: TensorProto) -> None:
        """Keep a tensor unchanged but inline: its external weight file is not part of the variant."""
        from onnx import TensorProto

        if tensor.data_location == TensorProto.EXTERNAL:
            self._add(tensor.name, self._load(tensor))
        else:
            self._tensors.append(tensor)

    def _add(self, name: str, values: Array) -> None:
        from onnx import numpy_helper

        self._tensors.append(numpy_helper.from_array(np.ascontiguousarray(values), name))

    def _load(self, tensor: TensorProto) -> Array:
        from onnx import numpy_helper

        found: Array = numpy_helper.to_array(tensor, base_dir=str(self._file.parent))
        return found


def quantize(values: Array, *, axis: int) -> tuple[Array, Array]:
    """Quantize an array to (int8 numbers, float32 scales), with one scale along `axis`: numbers * scales is within half
    a scale of every value. The scale is 1 where all values are zero, or too small to divide by."""
    most = (np.abs(values).max(axis=axis, keepdims=True) / 127).astype(np.float32)
    scales = np.where(most >= np.finfo(np.float32).tiny, most, np.float32(1.0))
    numbers = np.clip(np.rint(values / scales), -127, 127).astype(np.int8)
    return numbers, np.squeeze(scales, axis)


def _read_inside(graph: GraphProto) -> Iterator[str]:
    """Yield the names that subgraphs (branches and loops) read at any depth: they may be tensors of the graph
    itself."""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                for one in inner.node:
                    yield from one.input
                yield from (value.name for value in inner.output)
                yield from _read_inside(inner)


def _axis(node: NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def measure_parity(
    stored: StoredModel,
    variant: Variant,
    *,
    store: Store,
    engine: str,
    samples: Sequence[Mapping[str, Array]],
    grouped: bool = False,
    open_graph: Callable[[Path, Literal["f32"] | Variant], Run],
) -> Parity:
    """Return the parity of an existing variant, measured once per machine and kept in the store's notes.

    `engine` names the engine with its version and threads; `open_graph` opens a file on it, as "f32" or as the variant.
    Raises VerificationFailed if the variant may not serve, and the errors of `open_graph`. Blocks for seconds.
    """
    note, key = _note(variant, grouped), parity_key(engine, stored, samples)
    kept = _parse_parity(store.notes(stored).get(note))
    if kept is None or kept.key != key:
        path = variant_path(stored, variant, grouped=grouped)
        exact, small = open_graph(stored.graph, "f32"), open_graph(path, variant)
        found = compare(exact, small, samples, stored.manifest.text_spec, key=key)
        kept = msgspec.structs.replace(found, bytes=size_of(path))
        store.note(stored, note, msgspec.to_builtins(kept))
    return require(kept, variant)


def list_variants(stored: StoredModel, store: Store) -> list[tuple[Variant, int, Parity | None]]:
    """Return the variants beside a stored graph, with their bytes and the parity measured last."""
    notes = store.notes(stored)
    return [
        (variant, size_of(path), _parse_parity(notes.get(_note(variant, grouped))))
        for variant, grouped in FORMS
        if (path := variant_path(stored, variant, grouped=grouped)).is_file()
    ]


def _note(variant: Variant, grouped: bool) -> str:
    return f"variant_{_form(variant, grouped)}"


def _form(variant: Variant, grouped: bool) -> str:
    """The variant's name in names of files and notes: what was written in one form is never read as the other."""
    return f"{variant}-{GROUP_ROWS}" if grouped else variant


def _parse_parity(note: object) -> Parity | None:
    try:
        return _PARITY(note)
    except msgspec.ValidationError:
        return None


def compare(
    exact: Run,
    variant: Run,
    samples: Sequence[Mapping[str, Array]],
    spec: TextSpec,
    *,
    key: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Parity:
    """Run both graphs over the samples, batches of real inputs, and time them on the shortest and longest samples.

    Vectors are compared by every output of the model, scores by their logits.
    """
    names = (spec.score.output,) if spec.score is not None else _vectors(spec)
    both = [(run({**one}, names), one) for run in (exact, variant) for one in samples]
    left, right = both[: len(samples)], both[len(samples) :]
    speed = {}
    for one in {id(each): each for each in (samples[0], samples[-1])}.values():
        size, length = next(iter(one.values())).shape
        speed[f"{size}x{length}"] = round(_seconds(exact, one, names, clock) / _seconds(variant, one, names, clock), 2)
    if spec.score is not None:
        logits, others = _rows(left, names[0], spec), _rows(right, names[0], spec)
        span = max(float(logits.max() - logits.min()), 1.0)
        return Parity(key=key, max_difference=float(np.abs(logits - others).max()) / span, speed=speed)
    cosines = {name: _cosines(_rows(left, name, spec), _rows(right, name, spec)) for name in names}
    judged = [found for name, found in cosines.items() if name != spec.tokens or len(names) == 1]
    if not all(map(len, judged)):
        raise VerificationFailed("no sample has a vector to compare; use precision auto")
    return Parity(
        key=key,
        min_cosine=min(float(found.min()) for found in judged),
        mean_cosine=min(float(found.mean()) for found in judged),
        means={name: float(found.mean()) for name, found in cosines.items() if len(found)},
        speed=speed,
    )


def _rows(answers: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]], name: str, spec: TextSpec) -> Array:
    """Return one row per text, or per token without padding, of (outputs, inputs) of every batch."""
    by_token = spec.sparse is not None and spec.sparse.per == "token" and name == spec.sparse.output
    rows = []
    for outputs, inputs in answers:
        found, mask = outputs[name], inputs.get("attention_mask")
        if found.ndim == 3:
            found = found.reshape(-1, found.shape[-1]) if mask is None else found[mask > 0]
        elif mask is not None and by_token:
            found = found * (mask > 0)
        rows.append(found.astype(np.float64))
    width = max(found.shape[-1] for found in rows)
    return np.concatenate([np.pad(found, ((0, 0), (0, width - found.shape[-1]))) for found in rows])


def _cosines(exact: Array, other: Array) -> Array:
    """Return the cosines of the rows that are not zero in `exact`."""
    there = (exact != 0).any(axis=-1)
    return row_cosines(exact[there], other[there])


def require(parity: Parity, variant: Variant) -> Parity:
    """Return the parity of a variant that may serve. Raises VerificationFailed for any other."""
    if parity.mean_cosine is not None and not parity.mean_cosine >= LEAST_MEAN[variant]:
        raise VerificationFailed(
            f"this model loses too much accuracy with {variant}: mean cosine to f32 {parity.mean_cosine:.4f} < "
            f"{LEAST_MEAN[variant]}; use precision auto"
        )
    if parity.max_difference is not None and not parity.max_difference <= 1 - LEAST_MEAN[variant]:
        raise VerificationFailed(
            f"this model loses too much accuracy with {variant}: scores change by up to {parity.max_difference:.4f} "
            "of their range; use precision auto"
        )
    return parity


def parity_key(engine: str, stored: StoredModel, samples: Sequence[Mapping[str, Array]]) -> str:
    """Return what a Parity applies to: the engine with its version, the graph and its outputs, the samples."""
    facts = stored.manifest.files.get(stored.manifest.graph)
    outputs = ",".join(stored.manifest.text_spec.outputs)
    return f"{engine}; graph {facts.sha256[:16] if facts else ''} ({outputs}); samples {compute_digest(samples)}"


def size_of(path: Path) -> int:
    """Return the bytes of a variant with its weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _vectors(spec: TextSpec) -> tuple[str, ...]:
    """Return the outputs to compare: all except the unit vector of an output with the same direction."""
    return tuple(name for name in spec.outputs if name != spec.sentence_embedding or name == spec.pooled)


def _seconds(run: Run, sample: Mapping[str, Any], outputs: Sequence[str], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(_TIMED):
        begin = clock()
        run({**sample}, outputs)
        times.append(clock() - begin)
    return max(min(times), 1e-9)
