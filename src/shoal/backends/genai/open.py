"""Opens language models on this machine: files in the store, chat pipeline, generator and facts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.backends.base.chat_pipeline import load_chat_pipeline
from shoal.backends.genai import GenaiGenerator, GenaiOptions, start_generator
from shoal.config.settings import ModelTable, Settings
from shoal.core.protocols import ChatPipeline, GeneratorFacts, ModelFacts
from shoal.errors import AddressError, ConfigError
from shoal.models.gguf import read_gguf
from shoal.models.gguf_support import check as check_support
from shoal.models.gguf_support import rounded_kinds
from shoal.models.manifest import GenerationSpec
from shoal.models.store import StoredModel

logger = logging.getLogger("shoal.llm")

IR_DETAILS = "openvino_config.json"
"""The file in which optimum describes how it exported a model, notably its quantization."""

_QUANTIZED = re.compile(r"(?<![a-z0-9])(?:q[4-8]_[0-9k](?:_[sml])?|bf16|f16|f32)(?![a-z0-9])", re.IGNORECASE)
"""The precision of weights in the names of GGUF files."""


def model_kind(stored: StoredModel) -> Literal["embed", "generate"]:
    """Return the kind of a model in the store."""
    return "embed" if stored.manifest.generation is None else "generate"


async def open_llm(
    name: str, stored: StoredModel, settings: Settings, table: ModelTable
) -> tuple[ChatPipeline, GenaiGenerator, ModelFacts]:
    """Open a language model of the store and generate one token with it.

    Raises SetupError, and OutOfMemory or Crashed if it is too large for this machine.
    """
    spec = stored.manifest.generation
    if spec is None:
        raise AddressError(
            f"{name}: {stored.manifest.address} is an embedding model, which cannot generate: use a language model"
        )
    if table.adapters:
        raise ConfigError(
            f'[models."{name}".adapters]: local models do not support LoRA adapters; merge them into the model '
            "before the export, or use a server that supports them"
        )
    rounded = await asyncio.to_thread(_rounded_weights, stored, spec)
    generator = await start_generator(model_path(stored, spec), name=name, options=_options(spec, settings, table))
    try:
        pipeline = await asyncio.to_thread(
            load_chat_pipeline, stored.path, settings, context_tokens=generator.facts.context_tokens
        )
    except BaseException:
        await generator.aclose()
        raise
    if rounded:
        logger.warning(
            "%s: the engine rounds the minima of %s weights, so their error is 1.4 times as large; Q4_0, Q6_K, Q8_0 "
            "and F16 files are computed exactly",
            name,
            " and ".join(rounded),
        )
    details = {"max_streams": settings.max_streams, **generator.facts.details}
    if rounded:
        details["rounded_weights"] = rounded
    return pipeline, generator, _build_facts(stored, spec, generator.facts, details)


def _rounded_weights(stored: StoredModel, spec: GenerationSpec) -> list[str]:
    """Return the types of weights in a GGUF file that the engine rounds. Raises ModelFileError for a file that it would
    compute incorrectly; the file may have been stored before this check existed."""
    if spec.format != "gguf":
        return []
    model = read_gguf(stored.graph)
    check_support(model)
    return rounded_kinds(model)


def model_path(stored: StoredModel, spec: GenerationSpec) -> Path:
    """Return the path for the generator: the folder of an OpenVINO graph, or a GGUF file."""
    return stored.graph.parent if spec.format == "ir" else stored.graph


def _options(spec: GenerationSpec, settings: Settings, table: ModelTable) -> GenaiOptions:
    precision = settings.precision
    if precision == "fp16" or precision == "int8":  # noqa: PLR1714 - only this form narrows the type
        precision = "auto"  # both apply to an embedder's weights; a language model keeps its published ones
    return GenaiOptions(
        precision=precision,
        threads=settings.threads,
        max_streams=settings.max_streams,
        kv_cache_mb=settings.kv_cache_mb,
        kv_cache_precision=settings.kv_cache_precision,
        dynamic_quantization=settings.dynamic_quantization,
        prefix_caching=settings.prefix_caching,
        context_tokens=table.context_tokens or _min_limit(table.for_language_model.context_tokens, spec.context_tokens),
        stop_ids=spec.stop_ids,
        vocab_size=spec.vocab_size,
        cache_heads=spec.cache_heads,
    )


def _min_limit(*limits: int | None) -> int | None:
    """Return the smallest limit: a setting for all models never raises a model's own."""
    return min((limit for limit in limits if limit), default=None)


def _build_facts(stored: StoredModel, spec: GenerationSpec, able: GeneratorFacts, of_run: dict[str, Any]) -> ModelFacts:
    manifest = stored.manifest
    details: dict[str, Any] = {
        "parameters": manifest.parameters,
        "graph": manifest.conversion,
        "architecture": spec.architecture,
        **of_run,
    }
    return ModelFacts(
        id=manifest.id,
        source=manifest.source,
        backend="genai",
        tasks=("generate",),
        precision=_precision(stored, spec) or str(able.details["precision"]),
        space=_hash_weights(manifest.weights),
        revision=manifest.revision,
        verified="generated a token at load",
        context_tokens=able.context_tokens,
        details=details,
    )


def _precision(stored: StoredModel, spec: GenerationSpec) -> str:
    """Return the precision of the weights if the files state it: int4, int8, or the name of a GGUF quantization."""
    if spec.format == "gguf":
        found = _QUANTIZED.search(stored.graph.stem)
        return found[0].upper() if found else ""
    try:
        written = msgspec.json.decode((stored.graph.parent / IR_DETAILS).read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):  # it is only displayed
        return ""
    quantization = written.get("quantization_config") if isinstance(written, dict) else None
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    return f"int{bits}" if isinstance(bits, int) else ""


def _hash_weights(weights: dict[str, str]) -> str:
    """Return 16 hex digits that identify the weights."""
    return hashlib.sha256(msgspec.json.encode(sorted(weights.values()))).hexdigest()[:16]
