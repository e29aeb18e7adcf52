"""The process that exports a model with PyTorch: `python -m shoal.models.convert.export_process FOLDER INTO`.

It writes lines of JSON (`export.Line`) to its standard output, and exits when its standard input closes. See `export`
for its result.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.downloads.disk import link_or_copy
from shoal.errors import ModelFileError, ShoalError, VerificationFailed
from shoal.models.convert.contract import Contract, read_contract
from shoal.models.convert.contract.classifier import tells_segments
from shoal.models.convert.export import ExportResult, Kind, Line
from shoal.models.convert.verify import min_cosine
from shoal.models.sources.select import choose_in_folder, is_graph

GRAPH = "onnx/model.onnx"
OPSET = 20
WEIGHTS = "model.safetensors"
MIN_COSINE = 0.9999
MAX_DIFFERENCE = 1e-3
"""Relative to the largest value: both compute in float32, in a different order."""

INLINE_BYTES = 1_800_000_000
SHAPES = ((1, 1), (2, 7), (3, 33))
"""Batch shapes to compare; all rows but the first are padded. The graph was traced with another shape."""


Tell = Callable[[str, float], None]
"""Receives (stage, fraction)."""


def main() -> None:
    folder, into = Path(sys.argv[1]), Path(sys.argv[2])
    report(
        lambda tell: _run(folder, into, tell),
        "serve it with --engine torch, or use a repository that ships onnx/model.onnx",
    )


def report(work: Callable[[Tell], Any], otherwise: str) -> None:
    """Run `work`, and report its progress and result as lines; `otherwise` is the advice for a model that PyTorch
    cannot export."""
    exit_with_stdin()
    # Send what libraries print to stderr, so that stdout holds only lines.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: Line[Any]) -> None:
        print(msgspec.json.encode(line).decode(), file=output, flush=True)

    try:
        tell(Line(done=work(lambda stage, at: tell(Line(stage=stage, fraction=at)))))
    except VerificationFailed as error:
        tell(Line(error=error.message, kind="verification"))
    except ModelFileError as error:
        message = error.message.removeprefix(f"{error.file}: ")
        tell(Line(error=message, kind="model_file", file=error.file))
    except ShoalError as error:
        tell(Line(error=error.message, kind="model_file"))
    except Exception as error:  # torch and transformers raise anything on a model that they cannot export
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        tell(
            Line(
                error=f"PyTorch cannot export this model ({reason}); {otherwise}",
                kind="model_file",
            )
        )


def exit_with_stdin() -> None:
    """Kill this process and all its children once its standard input closes. The parent holds the other end, so the
    process does not outlive a killed server."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="input", daemon=True).start()


def _run(folder: Path, into: Path, tell: Tell) -> ExportResult:
    tell("read", 0.0)
    _copy_model_files(folder, into)
    tell("read", 1.0)
    contract = read_contract(into, foreign=True)
    kind, encoder = graph_kind(contract), contract.encoder_path
    model, inputs = _load(into / encoder, kind)
    tell("load", 1.0)
    prefix = f"{encoder}/" if encoder else ""
    target = into / encoder / GRAPH
    target.parent.mkdir(parents=True, exist_ok=True)
    tell("export", 0.0)
    output = "last_hidden_state" if kind == "encoder" else "logits"
    _export(model, inputs, output, target)
    tell("export", 1.0)
    verification = _verify(model, inputs, output, target)
    tell("verify", 1.0)
    return ExportResult(
        folder=str(into),
        kind=kind,
        graph=f"{prefix}{GRAPH}",
        inputs=inputs,
        verification=verification,
    )


def graph_kind(contract: Contract) -> Kind:
    """Return what the model's graph outputs: a classifier's logits, a masked language model's for SPLADE, or token
    vectors."""
    if contract.splade is not None:
        return "masked"
    return "encoder" if contract.classifier is None else "classifier"


def _copy_model_files(folder: Path, into: Path) -> None:
    """Copy the model's own files except graphs."""
    for name in choose_in_folder(folder):
        if not is_graph(name):
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(folder / name, target)


def _load(folder: Path, kind: Kind) -> tuple[Any, tuple[str, ...]]:
    """Return the model in float32, and the inputs of its graph. Raises ModelFileError for missing weights."""
    import inspect

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    options = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if getattr(config, "auto_map", None):
        raise ModelFileError(
            "the model contains custom code, which Shoal never runs", file="config.json", key="auto_map"
        )
    halved = config.is_encoder_decoder or config.model_type in ("t5", "mt5", "umt5")
    classes = {
        "encoder": transformers.AutoModelForTextEncoding if halved else transformers.AutoModel,
        "classifier": transformers.AutoModelForSequenceClassification,
        "masked": transformers.AutoModelForMaskedLM,
    }
    model, loading_info = classes[kind].from_pretrained(
        folder, config=config, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
    )
    missing = sorted(name for name in loading_info["missing_keys"] if kind != "encoder" or "pooler." not in name)
    if missing or loading_info["mismatched_keys"]:
        named = missing or [str(key[0]) for key in loading_info["mismatched_keys"]]
        raise ModelFileError(
            f"{len(named)} tensors are missing or of another shape; fetch the model again", file=WEIGHTS, key=named[0]
        )
    model.config.use_cache = False
    inputs = ["input_ids", "attention_mask"]
    segments = (getattr(config, "type_vocab_size", 0) or 0) > 1 and tells_segments(folder, "")
    if kind == "classifier" and segments and "token_type_ids" in inspect.signature(model.forward).parameters:
        inputs.append("token_type_ids")
    return model.eval(), tuple(inputs)


def _batch(model: Any, inputs: tuple[str, ...], size: int, length: int) -> dict[str, Any]:
    """Return random ids, later rows shorter and padded on the right; the same for the same shape."""
    draw = np.random.default_rng(size * 1000 + length)
    config = model.config
    vocabulary, pad = int(model.get_input_embeddings().num_embeddings), config.pad_token_id or 0
    ids = draw.integers(0, vocabulary, (size, length))
    ids[ids == pad] = (pad + 1) % vocabulary
    mask = (np.arange(length) < np.maximum(1, length - np.arange(size)[:, None] * length // (size + 1))).astype(
        np.int64
    )
    ids[mask == 0] = pad
    made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": (np.arange(length) > length // 2) * mask}
    return {name: np.ascontiguousarray(made[name]).astype(np.int64) for name in inputs}


def _run_torch(model: Any, feeds: dict[str, Any], output: str) -> Any:
    import torch

    with torch.inference_mode():
        answer = model(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    return getattr(answer, output).float().numpy()


def _export(model: Any, inputs: tuple[str, ...], output: str, target: Path) -> None:
    """Export with torch.export, which keeps sizes symbolic; tracing fixes the length in relative positions (DeBERTa,
    T5)."""
    import torch

    class Graph(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return getattr(self.model(**dict(zip(inputs, given, strict=True))), output)

    feeds = _batch(model, inputs, 2, 9)
    any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    size = sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad():
        torch.onnx.export(
            Graph(),
            tuple(torch.from_numpy(feeds[name]) for name in inputs),
            str(target),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=((any_size,) * len(inputs),),
            opset_version=OPSET,
            dynamo=True,
            external_data=size > INLINE_BYTES,
            verbose=False,
        )


def _verify(model: Any, inputs: tuple[str, ...], output: str, target: Path) -> str:
    """Compare the graph with PyTorch if there is an engine to run it. Raises VerificationFailed."""
    run = open_engine(target)
    if run is None:
        return "not compared with PyTorch: no engine for graphs is installed"
    cosine, furthest = 1.0, 0.0
    longest = getattr(model.config, "max_position_embeddings", None) or SHAPES[-1][1]
    for size, length in SHAPES:
        feeds = _batch(model, inputs, size, min(length, int(longest) - 2))
        right, got = _run_torch(model, feeds, output), run(feeds)
        if right.shape != got.shape:
            raise VerificationFailed(
                f"the exported graph gives {got.shape}, PyTorch {right.shape}; serve it with torch"
            )
        if right.ndim == 3:
            kept = feeds["attention_mask"] > 0
            right, got = right[kept], got[kept]
        scale = max(float(np.abs(right).max()), 1e-6)
        difference = np.abs(right - got).max() / scale
        furthest = max(furthest, float(difference) if np.isfinite(difference) else float("inf"))
        if right.shape[-1] > 1:
            cosine = min(cosine, min_cosine(right, got))
    if cosine < MIN_COSINE or furthest > MAX_DIFFERENCE:
        raise VerificationFailed(
            f"the exported graph does not agree with PyTorch: cosine >= {cosine:.4f}, largest difference "
            f"{furthest:.1e}; serve the model with --engine torch"
        )
    return (
        f"the exported graph agrees with PyTorch: cosine >= {min(cosine, 1.0):.6f}, largest difference {furthest:.1e}"
    )


def open_engine(target: Path) -> Any:
    """Open the graph on an installed engine: arrays in, the one output out. None without an engine."""
    try:
        import onnxruntime
    except ImportError:
        pass
    else:
        onnxruntime.disable_telemetry_events()
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(target), settings, providers=["CPUExecutionProvider"])
        return lambda feeds: session.run(None, feeds)[0]
    # Importing openvino sends telemetry, unless the package that does so is absent.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError:
        return None
    compiled = openvino.Core().compile_model(str(target), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: np.array(compiled(feeds)[0])


if __name__ == "__main__":
    main()
