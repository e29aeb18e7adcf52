"""Convert a model's folder, as published, to the files that Shoal serves: model.onnx and tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from shoal.errors import MissingExtra, ModelFileError, VerificationFailed
from shoal.models.convert.contract import Contract, read_contract, shipped_graph
from shoal.models.convert.contract.spec import text_spec
from shoal.models.convert.graphs.head import POOLED, TOKENS
from shoal.models.convert.graphs.shipped import adapt_shipped_graph
from shoal.models.convert.graphs.text import build_text_graph, can_build, graph_inputs
from shoal.models.tokenizer_file import TOKENIZER, write_tokenizer
from shoal.specs import TextSpec

GRAPH = "model.onnx"
Source: TypeAlias = Literal["shipped", "built"]
CheckResult = TypeVar("CheckResult")


class ConversionResult(msgspec.Struct, frozen=True, kw_only=True):
    """A converted model. `graph` and the spec's tokenizer are paths in the target folder; `source` says where the graph
    came from, `text` describes it in words; `files` are all files written."""

    spec: TextSpec
    contract: Contract
    graph: str
    source: Source
    parameters: int
    files: tuple[str, ...]
    text: str


def convert(
    folder: Path,
    target: Path,
    *,
    prefer: Source = "shipped",
    progress: Callable[[str, float], None] | None = None,
) -> ConversionResult:
    """Write the files to serve into the folder `target`, overwriting those of an earlier conversion.

    Uses the graph that the model ships (`prefer="shipped"`), else builds one from its weights. Static, SPLADE and
    late-interaction models are built wherever possible, since their shipped graphs end in many different ways.
    `progress` receives (stage, fraction). Raises ModelFileError, naming the file, for a model that cannot be served as
    its files say, and MissingExtra without the onnx package.
    """
    require_onnx()
    tell = progress or (lambda stage, fraction: None)
    tell("read", 0.0)
    contract = read_contract(folder)
    shipped = _choose_shipped_graph(folder, contract)
    write_tokenizer(folder, contract, target / TOKENIZER)
    tell("read", 1.0)
    if shipped is not None and (prefer == "shipped" or not can_build(folder, contract)):
        converted = _convert_shipped(folder, shipped, contract, target, tell)
    else:
        converted = _build(folder, contract, target, tell)
    tell("convert", 1.0)
    return converted


def convert_and_check(
    folder: Path,
    target: Path,
    check: Callable[[ConversionResult], CheckResult],
    *,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[ConversionResult, CheckResult]:
    """Convert, then verify with `check`, which returns its verdict or raises VerificationFailed.

    If a shipped graph is unusable or fails the check, build one where Shoal can.
    """
    try:
        converted = convert(folder, target, progress=progress)
        return converted, check(converted)
    except (ModelFileError, VerificationFailed) as error:
        contract = read_contract(folder)
        if _choose_shipped_graph(folder, contract) is None or not can_build(folder, contract):
            raise
        reason = error.message
    converted = convert(folder, target, prefer="built", progress=progress)
    text = f"{converted.text}, because the model's own graph was rejected ({reason})"
    return msgspec.structs.replace(converted, text=text), check(converted)


def _build(folder: Path, contract: Contract, target: Path, tell: Callable[[str, float], None]) -> ConversionResult:
    built = build_text_graph(folder, contract, target / GRAPH, progress=lambda fraction: tell("convert", fraction))
    return ConversionResult(
        spec=text_spec(
            contract,
            tokenizer=TOKENIZER,
            inputs=graph_inputs(contract),
            pooled=POOLED,
            tokens=TOKENS if contract.dimension and contract.table is None else "",
        ),
        contract=contract,
        graph=GRAPH,
        source="built",
        parameters=built.parameters,
        files=(*built.files, TOKENIZER),
        text=(
            f"built from {contract.file('model.safetensors')}"
            if contract.table
            else f"built from {contract.file('config.json')} and safetensors"
        ),
    )


def _convert_shipped(
    folder: Path, shipped: str, contract: Contract, target: Path, tell: Callable[[str, float], None]
) -> ConversionResult:
    taken = adapt_shipped_graph(
        folder, shipped, contract, target / GRAPH, progress=lambda fraction: tell("convert", fraction)
    )
    return ConversionResult(
        spec=text_spec(contract, tokenizer=TOKENIZER, inputs=taken.inputs, pooled=taken.pooled, tokens=taken.tokens),
        contract=contract,
        graph=GRAPH,
        source="shipped",
        parameters=taken.parameters,
        files=(GRAPH, *taken.data, TOKENIZER),
        text=f"the model's own {shipped} ({taken.kind})",
    )


def _choose_shipped_graph(folder: Path, contract: Contract) -> str | None:
    """Return the graph that came with the model; None if a built one is more reliable."""
    classifier = contract.classifier
    one_output = contract.dimension or (classifier is not None and classifier.answers is None)
    if (contract.table is not None or not one_output) and can_build(folder, contract):
        return None
    return shipped_graph(folder, contract.encoder_path)


def require_onnx() -> None:
    """Raises MissingExtra without the onnx package."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise MissingExtra("Converting a model", "local") from None
