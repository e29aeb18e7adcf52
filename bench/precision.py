"""What `auto` asks of bf16, measured on several ways to compute it and on models that it serves well and badly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import parser, phase, stored, write
from safetensors.numpy import load_file, save_file

from shoal.backends import parse_address
from shoal.backends.local.compile import output_names
from shoal.backends.local.open import precision_samples, prepare_local
from shoal.backends.local.precision import (
    MAX_FIGURES,
    MIN_FIGURES,
    PrecisionCheck,
    compare,
    limit_samples,
    to_comparable_rows,
)
from shoal.config.settings import Settings
from shoal.models.prepare import SOURCE
from shoal.models.store import StoredModel
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array

METHOD = """
Each model, converted as Shoal converts it, answers the samples of Shoal's precision check in f32 and in bf16; the
figures are those that decide (`asked` has the bounds), `least_cosine` is the worst row and decides nothing. `dense` is
the default model; all others are made of its weights. `shift N`: N is added to the bias of every layer's outputs, and
the LayerNorm behind it takes it away: the same vectors in f32, and activations of size N, which bf16 rounds to N/256.
`reranker` and `classifier` have a random head over its pooler, `splade` its word embeddings as head, `late` a random
projection of its tokens; `scores apart` is the reranker's head times 40, so that small moves of a logit are large ones
of a score. `paths`: the installed OpenVINO as it is and, for `dense`, held down by
ONEDNN_MAX_CPU_ISA (there bf16 is emulated, forty times slower), and
those of other versions in folders of their own (--site).
"""

Tensors = dict[str, Array]


def shifted(by: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {
            name: one + np.float32(by) if name.endswith("output.dense.bias") else one for name, one in tensors.items()
        }

    return change


def same(tensors: Tensors) -> Tensors:
    return tensors


def folder_of(source: Path, place: Path, change: Callable[[Tensors], Tensors], files: dict[str, Any]) -> Path:
    """A copy of the model in `source` with other weights; `files` are JSON, None leaves one out."""
    for path in source.rglob("*"):
        if path.is_file() and path.name != "model.safetensors":
            target = place / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    save_file(change(load_file(source / "model.safetensors")), place / "model.safetensors")
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (place / name).unlink(missing_ok=True)
        else:
            (place / name).write_text(json.dumps(content))
    return place


def scoring(source: Path, place: Path, labels: int, scale: float, shift: float = 0.0) -> Path:
    def change(tensors: Tensors) -> Tensors:
        random = np.random.default_rng(labels)
        width = tensors["embeddings.word_embeddings.weight"].shape[1]
        head = {
            "classifier.weight": (random.standard_normal((labels, width)) * scale).astype(np.float32),
            "classifier.bias": np.zeros(labels, np.float32),
        }
        return {f"bert.{name}": one for name, one in shifted(shift)(tensors).items()} | head

    names = {str(number): f"LABEL_{number}" for number in range(labels)}
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": names}
    config["label2id"] = {name: int(number) for number, name in names.items()}
    left_out = dict.fromkeys(("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"))
    return folder_of(source, place, change, {**left_out, "config.json": config})


def splade(source: Path, place: Path) -> Path:
    def change(tensors: Tensors) -> Tensors:
        words = tensors["embeddings.word_embeddings.weight"]
        size, width = words.shape
        head = {
            "cls.predictions.transform.dense.weight": np.eye(width, dtype=np.float32),
            "cls.predictions.transform.dense.bias": np.zeros(width, np.float32),
            "cls.predictions.transform.LayerNorm.weight": np.full(width, 3, np.float32),
            "cls.predictions.transform.LayerNorm.bias": np.zeros(width, np.float32),
            "cls.predictions.bias": np.zeros(size, np.float32),
        }
        return {f"bert.{name}": one for name, one in tensors.items()} | head

    config = json.loads((source / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    kind = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{kind}SpladePooling"},
    ]
    files = {
        "config.json": config,
        "modules.json": modules,
        "1_SpladePooling/config.json": {"pooling_strategy": "max"},
        "config_sentence_transformers.json": {"model_type": "SparseEncoder", "prompts": {"query": ""}},
    }
    return folder_of(source, place, change, files)


def late(source: Path, place: Path) -> Path:
    width = json.loads((source / "config.json").read_text())["hidden_size"]
    kind = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    settings = {"model_type": "ColBERT", "query_length": 32, "document_length": 180, "similarity_fn_name": "MaxSim"}
    settings |= {"query_prefix": "", "document_prefix": "", "attend_to_expansion_tokens": False, "skiplist_words": []}
    dense = {"in_features": width, "out_features": 128, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    files = {
        "modules.json": modules,
        "config_sentence_transformers.json": settings,
        "1_Dense/config.json": dense,
    }
    made = folder_of(source, place, same, files)
    weights = np.random.default_rng(3).standard_normal((128, width)).astype(np.float32)
    save_file({"linear.weight": weights / 20}, made / "1_Dense" / "model.safetensors")
    return made


def made(source: Path, place: Path) -> dict[str, Path]:
    """Every model by its name, as a folder of its author."""
    return {
        "dense": source,
        **{f"shift {by}": folder_of(source, place / f"shift-{by}", shifted(by), {}) for by in (3, 10, 100)},
        "reranker": scoring(source, place / "reranker", 1, 0.3),
        "reranker, scores apart": scoring(source, place / "apart", 1, 12.0),
        "reranker, shift 30": scoring(source, place / "reranker-30", 1, 0.3, 30.0),
        "classifier": scoring(source, place / "classifier", 5, 0.3),
        "classifier, shift 30": scoring(source, place / "classifier-30", 5, 0.3, 30.0),
        "splade": splade(source, place / "splade"),
        "late": late(source, place / "late"),
    }


def measure(graph: Path, folder: Path, spec_file: Path) -> dict[str, Any]:
    """In a process of its own: the figures of one model with the openvino that is found first."""
    import msgspec
    import openvino

    from shoal.specs import TextSpec

    spec = msgspec.json.decode(spec_file.read_bytes(), type=TextSpec)
    pipeline = (PairPipeline if spec.score is not None else TextPipeline)(folder, spec, truncate=True)
    samples = limit_samples(precision_samples(pipeline), graph.stat().st_size)
    core = openvino.Core()
    model = core.read_model(str(graph))
    names = output_names(model)
    found: dict[str, list[Any]] = {}
    for precision in ("f32", "bf16"):
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1})
        request = compiled.create_infer_request()
        found[precision] = []
        for sample in samples:
            answers = [answer.copy() for answer in request.infer(dict(sample)).values()]
            found[precision].append(to_comparable_rows(dict(zip(names, answers, strict=True)), sample, spec))
    checked = PrecisionCheck("", figures=compare(found["f32"], found["bf16"], spec))
    result = {name: round(value, 7) for name, value in checked.figures.items()}
    if spec.score is None:
        result["least_cosine"] = round(
            min(least(a[name], b[name]) for a, b in zip(*found.values(), strict=True) for name in a), 7
        )
    return {"openvino": openvino.__version__.partition("-")[0], "auto": "bf16" if checked.agrees else "f32", **result}


def least(exact: Array, fast: Array) -> float:
    there = exact.any(axis=-1)
    a, b = exact[there].astype(np.float64), fast[there].astype(np.float64)
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min(initial=1.0))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--site", action="append", default=[], help="folder that another openvino was installed into"
    )
    arguments.add_argument("--isa", action="append", default=[], help="a value of ONEDNN_MAX_CPU_ISA")
    arguments.add_argument("--only", action="append", default=[], help="measure these models alone")
    arguments.add_argument("--one", nargs=3, help="graph, folder and spec of one model: print its figures")
    options = arguments.parse_args()
    if options.one:
        print(json.dumps(measure(*map(Path, options.one))))
        return
    import msgspec

    source = stored(options.model).path / SOURCE
    paths = {"installed": {}}
    paths |= {f"ONEDNN_MAX_CPU_ISA={isa}": {"ONEDNN_MAX_CPU_ISA": isa} for isa in options.isa}
    paths |= {f"openvino in {Path(site).name}": {"PYTHONPATH": site} for site in options.site}
    results: dict[str, Any] = {"asked": {"at_least": MIN_FIGURES, "at_most": MAX_FIGURES}, "models": {}}
    with tempfile.TemporaryDirectory() as place:
        for name, folder in made(source, Path(place)).items():
            if options.only and name not in options.only:
                continue
            one: StoredModel = prepare_local(parse_address(f"file:{folder}"), Settings(home=f"{place}/home"))
            spec = Path(place) / "spec.json"
            spec.write_bytes(msgspec.json.encode(one.manifest.text_spec))
            rows = results["models"][name] = {}
            for path, changes in paths.items():
                if "ONEDNN_MAX_CPU_ISA" in changes and name != "dense":
                    continue
                with phase(f"{name}, {path}"):
                    command = [sys.executable, __file__, "--one", str(one.graph), str(one.path), str(spec)]
                    done = subprocess.run(
                        command, env=os.environ | changes, capture_output=True, text=True, check=False
                    )
                    if done.returncode:
                        sys.exit(f"{name}, {path}: {done.stderr}")
                    rows[path] = json.loads(done.stdout)
                    print(f"  {rows[path]}")
    write("precision", METHOD, results, ("shoal", "openvino", "numpy", "tokenizers"))


if __name__ == "__main__":
    main()
