"""A small random encoder as an ONNX file, and the same computation in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.types import Array

VOCAB = 100
WIDTH = 64
SLOW_WIDTH = 256
OUTPUTS = ("sentence_embedding", "pooled")


class Tiny:
    """Token and position vectors, `depth` layers of a matrix and tanh, the mean over attended tokens, normalized or
    not. A batch longer than `positions` fails in the graph."""

    def __init__(self, depth: int = 2, width: int = WIDTH, positions: int = 512) -> None:
        draw = np.random.default_rng(7)
        self.table = draw.standard_normal((VOCAB, width)).astype(np.float32)
        self.positions = draw.standard_normal((positions, width)).astype(np.float32) * 0.1
        self.layers = [(draw.standard_normal((width, width)) / width**0.5).astype(np.float32) for _ in range(depth)]

    def save(self, path: Path) -> Path:
        import onnx
        from onnx import TensorProto, numpy_helper
        from onnx import helper as make

        weights = [numpy_helper.from_array(self.table, "table"), numpy_helper.from_array(np.array([-1]), "last")]
        weights += [
            numpy_helper.from_array(np.array([1]), "axis"),
            numpy_helper.from_array(np.array(1e-9, np.float32), "tiny"),
        ]
        weights += [numpy_helper.from_array(self.positions, "positions")]
        weights += [numpy_helper.from_array(np.array([at]), name) for at, name in ((0, "zero"), (2, "two"))]
        nodes: list[Any] = [
            make.make_node("Gather", ["table", "input_ids"], ["words"]),
            make.make_node("Shape", ["input_ids"], ["shape"]),
            make.make_node("Slice", ["shape", "axis", "two"], ["end"]),
            make.make_node("Slice", ["positions", "zero", "end", "zero"], ["places"]),
            make.make_node("Add", ["words", "places"], ["h0"]),
        ]
        for at, layer in enumerate(self.layers):
            weights.append(numpy_helper.from_array(layer, f"w{at}"))
            nodes.append(make.make_node("MatMul", [f"h{at}", f"w{at}"], [f"m{at}"]))
            nodes.append(make.make_node("Tanh", [f"m{at}"], [f"h{at + 1}"]))
        nodes += [
            make.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            make.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            make.make_node("Mul", [f"h{len(self.layers)}", "column"], ["kept"]),
            make.make_node("ReduceSum", ["kept", "axis"], ["total"], keepdims=0),
            make.make_node("ReduceSum", ["column", "axis"], ["count"], keepdims=0),
            make.make_node("Max", ["count", "tiny"], ["some"]),
            make.make_node("Div", ["total", "some"], ["pooled"]),
            make.make_node("ReduceL2", ["pooled", "last"], ["norm"], keepdims=1),
            make.make_node("Max", ["norm", "tiny"], ["length"]),
            make.make_node("Div", ["pooled", "length"], ["sentence_embedding"]),
        ]
        inputs = [
            make.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
            for name in ("input_ids", "attention_mask")
        ]
        outputs = [
            make.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", self.table.shape[1]]) for name in OUTPUTS
        ]
        graph = make.make_graph(nodes, "tiny", inputs, outputs, weights)
        onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10), path)
        return path

    def answer(self, inputs: dict[str, Array]) -> dict[str, Array]:
        ids = inputs["input_ids"]
        hidden = self.table[ids].astype(np.float64) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            hidden = np.tanh(hidden @ layer)
        mask = inputs["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / np.maximum(mask.sum(1), 1e-9)
        unit = pooled / np.maximum(np.linalg.norm(pooled, axis=-1, keepdims=True), 1e-9)
        return {"sentence_embedding": unit, "pooled": pooled}


def batch(*lengths: int, seed: int = 0, width: int = 0) -> dict[str, Array]:
    """Random ids of these lengths, padded with id 0 to the longest, or to `width`."""
    draw = np.random.default_rng(seed)
    ids = np.zeros((len(lengths), max(*lengths, width, 1)), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = draw.integers(1, VOCAB, length)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}
