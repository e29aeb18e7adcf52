"""Build a static model's graph: from input_ids to the mean of their vectors. Modules follow as for an encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.models.convert.contract.types import Table
from shoal.models.convert.contract.weights import Floats, Weights, open_weights
from shoal.models.convert.graphs.builder import Graph


def build_table(graph: Graph, table: Table, folder: Path) -> str:
    """Append the look-up and the mean over the mask; return its name, float32 [b, width]. An empty mask gives zeros.

    A mapping and factors are folded into the table, which then has a row for each id. The sum is a matrix product,
    three times as fast as an elementwise product and a sum, which is most of such a model's cost. Raises ModelFileError
    if the weights are missing.
    """
    weights = open_weights(folder, table.path)
    rows = graph.weight("table", (table.ids, table.width), lambda: table_rows(table, weights))
    mask = graph.cast_float("attention_mask")
    vectors = graph.op("Gather", rows, "input_ids")
    total = graph.reduce("ReduceSum", graph.op("MatMul", graph.unsqueeze(mask, 1), vectors), 1, keep=False)
    count = graph.cast_float(graph.reduce("ReduceSum", "attention_mask", 1, keep=True))
    return graph.op("Div", total, graph.op("Max", count, graph.number(1.0)))


def table_rows(table: Table, weights: Weights) -> Floats:
    """Return the vector of every id, [ids, width]."""
    places = weights.integers(table.mapping) if table.mapping else None
    rows = weights.table_rows(table.tensor, slice(None) if places is None else places)
    if table.weights:
        rows = rows * weights.get(table.weights, (table.ids,))[:, np.newaxis]
    return rows
