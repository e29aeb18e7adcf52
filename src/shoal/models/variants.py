"""Variants of a stored graph with smaller weights, made on this machine, and what they cost in parity.

int8: weights of matrix products as one int8 number each with a scale for each output column, and large tables with a
scale for each row; symmetric, so without offsets. Engines multiply them by inputs that they quantise on the fly, token
by token, so that a text's vector does not depend on its neighbours (a scale over a whole batch would). Nothing needs
texts to calibrate with. fp16: the same tensors as half-precision numbers that are widened when they are read: half of
the disk, no speed.

A variant is another approximation of the same model. It is an operator's explicit choice, never taken by `auto`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.progress import Stop
from shoal.models.store import Store, Stored
from shoal.models.verify import Run
from shoal.types import Array, TextSpec

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

Variant: TypeAlias = Literal["int8", "fp16"]

VARIANTS: tuple[Variant, ...] = ("int8", "fp16")
LEAST_MEAN = {"int8": 0.99, "fp16": 0.9999}
"""Mean cosine to the f32 graph below which a variant is not served. Of int8, 0.9988 was measured for all-MiniLM-L6-v2:
a mean below this is a model that does not survive its weights being rounded, and its vectors are of no use."""

TABLE_ROWS = 2048
"""A table with fewer rows (positions, token types) is not worth being rounded."""

LARGEST_HALF = 65504.0
INLINE_BYTES = 1_800_000_000
_FLOAT, _HALF, _DEQUANTIZE_OPSET = 1, 10, 13
_TIMED = 5


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """A variant against the f32 graph over the sample texts, on this machine.

    `key`: engine, graph and samples that it holds for. `min_cosine`, `mean_cosine`: over rows, of a model that gives
    vectors. `max_difference`: the largest of a logit, of one that scores, in parts of the range that they span.
    `speed`: the f32 graph's time over the variant's, by batch ("8x32"). `bytes`: of its files.
    """

    key: str
    min_cosine: float | None = None
    mean_cosine: float | None = None
    max_difference: float | None = None
    speed: dict[str, float] = {}
    bytes: int = 0


def variant_path(stored: Stored, variant: Variant) -> Path:
    """Where a stored model's variant lies, whether it is there or not: beside the graph."""
    return stored.graph.with_name(f"{stored.graph.stem}.{variant}{stored.graph.suffix}")


def make_variant(stored: Stored, variant: Variant, *, stop: Stop | None = None) -> Path:
    """The variant of a stored model, written when it is not there yet; seconds, and no engine.

    It appears whole or not at all, and equal graphs give equal bytes, so that several processes may make it at once.
    Raises ModelFileError for a graph that has nothing to make smaller, or is too old for it; Cancelled; OSError.
    """
    path = variant_path(stored, variant)
    if path.is_file():
        return path
    if stored.graph.suffix != ".onnx":
        raise ModelFileError(f"only ONNX graphs have {variant} variants; use precision auto", file=stored.graph.name)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".variant-") as place:
        made = Path(place) / path.name
        write_variant(stored.graph, made, variant, stop=stop)
        # Weights first: whoever sees the graph finds them beside it.
        for file in sorted(Path(place).iterdir(), key=lambda each: each == made):
            os.replace(file, path.parent / file.name)
    return path


def write_variant(graph: Path, target: Path, variant: Variant, *, stop: Stop | None = None) -> None:
    """Write `target` from the f32 `graph`, tensor by tensor. Raises what `make_variant` does."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _DEQUANTIZE_OPSET:
        raise ModelFileError(
            f"opset {opset} cannot hold {variant} weights, which need {_DEQUANTIZE_OPSET}; use precision auto",
            file=graph.name,
        )
    _Smaller(model, graph, variant, stop or Stop()).run()
    if model.ByteSize() > INLINE_BYTES:
        onnx.save(model, str(target), save_as_external_data=True, location=f"{target.name}_data", size_threshold=1024)
    else:
        target.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(target))


class _Smaller:
    """Replaces the weights of one graph, in place."""

    def __init__(self, model: ModelProto, graph: Path, variant: Variant, stop: Stop) -> None:
        self._body = model.graph
        self._file = graph
        self._variant = variant
        self._stop = stop
        self._nodes: list[NodeProto] = []
        self._tensors: list[TensorProto] = []
        self._replaced: set[str] = set()

    def run(self) -> None:
        products, tables = self._chosen()
        for tensor in self._body.initializer:
            self._stop.check()
            if tensor.name in products:
                self._product(tensor)
            elif tensor.name in tables:
                self._table(tensor)
            else:
                self._keep(tensor)
        if not self._replaced:
            raise ModelFileError(
                f"holds no float32 weights that {self._variant} would make smaller; use precision auto",
                file=self._file.name,
            )
        widened = [*self._nodes]
        for node in self._body.node:
            widened.extend(self._read(node))
        del self._body.initializer[:], self._body.node[:]
        self._body.initializer.extend(self._tensors)
        self._body.node.extend(widened)

    def _chosen(self) -> tuple[set[str], set[str]]:
        """The names of matrices that are multiplied by, and of tables that rows are taken of; no tensor with another
        use is touched."""
        matrices = {
            tensor.name: tensor.dims
            for tensor in self._body.initializer
            if tensor.data_type == _FLOAT and len(tensor.dims) == 2
        }
        products, tables, others = set(), set(), set()
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

    def _product(self, tensor: TensorProto) -> None:
        from onnx import helper

        values = self._load(tensor)
        name = tensor.name
        if self._variant == "fp16":
            if self._halved(name, values):
                self._nodes.append(helper.make_node("Cast", [f"{name}/fp16"], [name], to=_FLOAT))
            return
        numbers, scales = rounded(values, axis=0)
        self._add(f"{name}/int8", numbers)
        self._add(f"{name}/scale", scales)
        self._replaced.add(name)
        self._nodes.append(helper.make_node("DequantizeLinear", [f"{name}/int8", f"{name}/scale"], [name], axis=1))

    def _table(self, tensor: TensorProto) -> None:
        values = self._load(tensor)
        if self._variant == "fp16":
            self._halved(tensor.name, values)
            return
        numbers, scales = rounded(values, axis=1)
        self._add(f"{tensor.name}/int8", numbers)
        self._add(f"{tensor.name}/scale", scales[:, None])
        self._replaced.add(tensor.name)

    def _read(self, node: NodeProto) -> list[NodeProto]:
        """A node that takes rows of a replaced table, as those that widen only these rows; any other as it is."""
        from onnx import helper

        if node.op_type != "Gather" or node.input[0] not in self._replaced:
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

    def _halved(self, name: str, values: Array) -> bool:
        if np.abs(values).max(initial=0.0) > LARGEST_HALF:  # it would become infinite
            self._add(name, values)
            return False
        self._add(f"{name}/fp16", values.astype(np.float16))
        self._replaced.add(name)
        return True

    def _keep(self, tensor: TensorProto) -> None:
        """As it is, but inside of the graph: the file of weights that it may lie in is not the variant's."""
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


def rounded(values: Array, *, axis: int) -> tuple[Array, Array]:
    """(int8 numbers, float32 scales) of a matrix, a scale for all that `axis` runs over: numbers * scales is within
    half a scale of every value. Where all are zero, or too small to be divided by, the scale is 1."""
    most = (np.abs(values).max(axis=axis, keepdims=True) / 127).astype(np.float32)
    scales = np.where(most >= np.finfo(np.float32).tiny, most, np.float32(1.0))
    numbers = np.clip(np.rint(values / scales), -127, 127).astype(np.int8)
    return numbers, np.squeeze(scales, axis)


def _axis(node: NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def parity_of(
    stored: Stored,
    variant: Variant,
    *,
    store: Store,
    engine: str,
    samples: Sequence[Mapping[str, Array]],
    open_graph: Callable[[Path, Literal["f32"] | Variant], Run],
) -> Parity:
    """The parity of a variant that was made, measured once on a machine and kept in the store's notes.

    `engine` names the engine with its version and threads; `open_graph` opens a file on it, "f32" or as the variant.
    Raises VerificationFailed when the variant may not serve, and what `open_graph` raises. Blocks for seconds.
    """
    note, key = _note(variant), key_of(engine, stored, samples)
    kept = _kept(store.notes(stored).get(note))
    if kept is None or kept.key != key:
        path = variant_path(stored, variant)
        exact, small = open_graph(stored.graph, "f32"), open_graph(path, variant)
        found = compare(exact, small, samples, stored.manifest.text_spec, key=key)
        kept = msgspec.structs.replace(found, bytes=size_of(path))
        store.note(stored, note, msgspec.to_builtins(kept))
    return require(kept, variant)


def made_of(stored: Stored, store: Store) -> list[tuple[Variant, int, Parity | None]]:
    """The variants that lie beside a stored graph, with their bytes and the parity that was measured last."""
    notes = store.notes(stored)
    paths = {variant: variant_path(stored, variant) for variant in VARIANTS}
    return [
        (variant, size_of(path), _kept(notes.get(_note(variant)))) for variant, path in paths.items() if path.is_file()
    ]


def _note(variant: Variant) -> str:
    return f"variant_{variant}"


def _kept(note: object) -> Parity | None:
    try:
        return msgspec.convert(note, Parity)
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
    """Run both over the samples, batches of real inputs, and time them on the shortest and the longest of these.

    Vectors are compared by the output that users get, scores by their logits.
    """
    output = spec.score.output if spec.score is not None else _vectors(spec)
    rows = [(exact({**one}, (output,))[output], variant({**one}, (output,))[output]) for one in samples]
    left, right = (np.concatenate([pair[side] for pair in rows]).astype(np.float64) for side in (0, 1))
    speed = {}
    for one in {id(each): each for each in (samples[0], samples[-1])}.values():
        size, length = next(iter(one.values())).shape
        speed[f"{size}x{length}"] = round(
            _seconds(exact, one, output, clock) / _seconds(variant, one, output, clock), 2
        )
    if spec.score is not None:
        span = max(float(left.max() - left.min()), 1.0)
        return Parity(key=key, max_difference=float(np.abs(left - right).max()) / span, speed=speed)
    cosines = _cosines(left, right)
    if not len(cosines):
        raise VerificationFailed("no sample has a vector to compare with; use precision auto")
    return Parity(key=key, min_cosine=float(cosines.min()), mean_cosine=float(cosines.mean()), speed=speed)


def _cosines(exact: Array, other: Array) -> Array:
    """Of the rows that are not zero in `exact`; -1 where the other's are zero or not finite."""
    length = np.linalg.norm(exact, axis=-1)
    there = length > 0
    product = (length * np.linalg.norm(other, axis=-1))[there]
    sound = np.isfinite(product) & (product > 0)
    found: Array = np.where(sound, (exact * other).sum(-1)[there] / np.where(sound, product, 1.0), -1.0)
    return found


def require(parity: Parity, variant: Variant) -> Parity:
    """Answer the parity of a variant that may serve. Raises VerificationFailed for another."""
    if parity.mean_cosine is not None and not parity.mean_cosine >= LEAST_MEAN[variant]:
        raise VerificationFailed(
            f"this model does not survive {variant}: mean cosine to f32 {parity.mean_cosine:.4f} < "
            f"{LEAST_MEAN[variant]}; use precision auto"
        )
    if parity.max_difference is not None and not parity.max_difference <= 1 - LEAST_MEAN[variant]:
        raise VerificationFailed(
            f"this model does not survive {variant}: a score moves by {parity.max_difference:.4f} of their range; "
            "use precision auto"
        )
    return parity


def key_of(engine: str, stored: Stored, samples: Sequence[Mapping[str, Array]]) -> str:
    """What a Parity holds for: the engine with its version, the graph, the samples."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, array in sorted(sample.items()):
            digest.update(f"{name} {array.shape} ".encode() + array.tobytes())
    facts = stored.manifest.files.get(stored.manifest.graph)
    return f"{engine}; graph {facts.sha256[:16] if facts else ''}; samples {digest.hexdigest()[:16]}"


def size_of(path: Path) -> int:
    """Bytes of a variant with its weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _vectors(spec: TextSpec) -> str:
    if spec.dimension:
        return spec.pooled
    if spec.sparse is not None and spec.sparse.per == "vocabulary":
        return spec.sparse.output
    raise ModelFileError("gives only vectors of tokens, which are not compared; use precision auto", file="model.onnx")


def _seconds(run: Run, sample: Mapping[str, Any], output: str, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(_TIMED):
        begin = clock()
        run({**sample}, (output,))
        times.append(clock() - begin)
    return max(min(times), 1e-9)
