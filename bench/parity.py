"""Shoal's vectors and scores against those of the libraries that saved the models: one table of families and engines.

Run by a Python with PyTorch, transformers, sentence-transformers and model2vec: `.venv-parity/bin/python
bench/parity.py`. The models are those of tests/parity/families.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, RESULTS, parser, write

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(HERE.parent))

from shoal.bench.machine import describe_machine
from tests.parity.families import ALL, Answers, Family, opened
from tests.parity.sentence_pairs import PAIRS, TIE, Agreement, agreement

METHOD = f"""
The {len(PAIRS)} pairs of src/shoal/models/sentence_pairs.tsv. Every model but the default one, all-MiniLM-L6-v2 from
PyPI, is a tiny random one of two layers, saved by the library named beside it, which also says what is right, in f32
on the CPU; its vocabulary is mostly letters, so most sentences are cut at its 48 tokens. Shoal opens the same files by
`shoal.open`, from the address over store, conversion, tokenising and batcher to the engine; PyTorch's engine does not
run tables of static vectors. `cosine_min`: of all vectors, one a text or one a token; a sparse one counts with all its
zeros. `max_abs_diff`: of any number of a vector, or of any score; raw scores are logits. `order`: of the pairs by
cosine, dot product (sparse), MaxSim (multi; first sentences are queries) or score, each label for itself; identical
when no two pairs change places whose reference scores differ by more than {TIE:g} (of the largest score, where that is
above 1); couples that are closer and do change are counted as ties. Otherwise the number of couples out of place, and
Spearman's rank correlation. bf16, where the processor has it, is forced, while `precision` "auto" takes it only for a
model whose samples agree with f32 (docs/models.md). Its rounding moves more pairs of a tiny model than of the
default one, whose cosines are spread four times as far (standard deviation 0.30, of `bert` 0.07).
"""
NATIVE_BF16 = {"avx512_bf16", "amx_bf16"} & set(describe_machine().isa)
ENGINES = (
    ("openvino", "f32"),
    ("onnxruntime", "f32"),
    ("torch", "f32"),
    *((("openvino", "bf16"),) if NATIVE_BF16 else ()),
)
PACKAGES = ("shoal", "openvino", "onnxruntime", "torch", "transformers", "sentence-transformers", "model2vec",
            "tokenizers", "numpy")  # fmt: skip
Row = dict[str, Any]


def measured(family: Family, place: Path) -> list[Row]:
    folder = family.write(place)
    expected = family.expect(folder)
    found = []
    for engine, precision in ENGINES:
        labels = {"family": family.name, "reference": family.library, "engine": f"{engine} {precision}"}
        home = place / ("folders" if engine == "torch" else "graphs")
        if engine == "torch" and family.table:
            continue
        with opened(family, folder, home, engine=engine, precision=precision) as model:
            got = family.ask(model)
        found += [{**labels, "what": what, **figures(one)} for what, one in compared(got, expected)]
    return found


def compared(got: Answers, expected: Answers) -> list[tuple[str, Agreement]]:
    assert got.keys() == expected.keys()
    return [(what, agreement(got[what], answer)) for what, answer in expected.items()]


def figures(found: Agreement) -> Row:
    row: Row = {"cosine_min": found.min_cosine, "max_abs_diff": found.max_difference}
    if found.order is not None:
        exchanged, apart, spearman = found.order
        row |= {"identical": apart == 0, "apart": apart, "ties": exchanged - apart, "spearman": spearman}
    return row


def summary(rows: list[Row]) -> Row:
    """The worst of each engine."""
    found: dict[str, Row] = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        served = [row for row in rows if row["engine"] == engine]
        ranked = [row for row in served if "identical" in row]
        vectors = [row for row in served if row["cosine_min"] is not None]
        found[engine] = {
            "families": len({row["family"] for row in served}),
            "min_cosine": min(row["cosine_min"] for row in vectors),
            "max_vector_difference": max(row["max_abs_diff"] for row in vectors),
            "max_score_difference": max(row["max_abs_diff"] for row in served if row["cosine_min"] is None),
            "rankings": len(ranked),
            "identical": sum(row["identical"] for row in ranked),
            "min_spearman": min(row["spearman"] for row in ranked),
        }
    return found


def page(report: Row) -> str:
    machine, results = report["machine"], report["results"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Parity with the reference libraries",
        "",
        "Written by `bench/parity.py`; all digits are in [parity.json](parity.json).",
        "",
        f"{report['date']} · {machine['processor']} · {machine['cores']} cores ({', '.join(machine['isa'])})"
        f" · {machine['system']} · Python {machine['python']}",
        "",
        versions,
        "",
        report["method"],
        "",
        "## The worst of each engine",
        "",
        *table([{"engine": name, **row} for name, row in results["worst"].items()]),
        "## Every family",
        "",
        *table([line(row) for row in results["rows"]]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def line(row: Row) -> Row:
    found = {key: row[key] for key in ("family", "what", "reference", "engine", "cosine_min", "max_abs_diff")}
    if "identical" not in row:
        return {**found, "order": None}
    if not row["identical"]:
        return {**found, "order": f"{row['apart']} out of place, Spearman {shown(row['spearman'])}"}
    return {**found, "order": "identical" + (f" but for ties: {row['ties']}" if row["ties"] else "")}


def table(rows: list[Row]) -> list[str]:
    heads = list(rows[0])
    lines = [f"| {' | '.join(head.replace('_', ' ') for head in heads)} |", "|" + "---|" * len(heads)]
    return [*lines, *(f"| {' | '.join(shown(row[head]) for head in heads)} |" for row in rows), ""]


def shown(value: object) -> str:
    """Cosines and correlations by what they lack to 1, where that is little."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if 0.9 < value <= 1.0:
            return f"1 - {1.0 - value:.0e}" if value > 1 - 1e-6 else f"{value:.7f}"
        return f"{value:.1e}"
    return str(value).replace("|", "\\|")


def main() -> None:
    import torch
    from transformers.utils import logging

    parser(__doc__).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # its threads wait by spinning, which costs short texts more than they gain
    rows: list[Row] = []
    start = time.perf_counter()
    for family in ALL:
        with tempfile.TemporaryDirectory() as place:
            rows += measured(family, Path(place))
        print(f"{time.perf_counter() - start:5.0f} s  {family.name}", flush=True)
    results = {"pairs": len(PAIRS), "table": "[parity.md](parity.md)", "worst": summary(rows), "rows": rows}
    path = write("parity", METHOD, results, PACKAGES)
    (RESULTS / "parity.md").write_text(page(json.loads(path.read_text())))
    print(json.dumps(results["worst"], indent=1))


if __name__ == "__main__":
    main()
