"""The wire APIs that clients speak. Each surface is one package and one entry in `SURFACES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.batches import BatchDesk
from shoal.core.protocols import Surface
from shoal.http.application import Application, build_app
from shoal.http.images import ImageReader
from shoal.http.path_override import override_paths
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.anthropic import Anthropic
from shoal.surfaces.batches import Batches
from shoal.surfaces.cohere import Cohere
from shoal.surfaces.health import Health
from shoal.surfaces.images import Images
from shoal.surfaces.infer import Infer
from shoal.surfaces.kserve import KServe
from shoal.surfaces.models import Models
from shoal.surfaces.ollama import Ollama
from shoal.surfaces.openai import OpenAI
from shoal.surfaces.proxy.auto_batching import AutoBatchingProxy
from shoal.surfaces.proxy.triton_grpc import Embedding
from shoal.surfaces.requests import Requests
from shoal.surfaces.rerank import Ranking, RerankDocuments
from shoal.surfaces.rerank.wire import AnyRerankRequest
from shoal.surfaces.shared.rerank_path import RerankPath
from shoal.surfaces.tei import RerankTexts, Tei
from shoal.surfaces.vllm import Scoring


def _build_rerank(options: Options) -> Surface:
    return RerankPath(RerankDocuments(options), RerankTexts(options), AnyRerankRequest, options.max_inputs)


SURFACES: tuple[Callable[[Options], Surface], ...] = (
    OpenAI,
    Anthropic,
    Batches,
    Tei,
    _build_rerank,
    Ranking,
    Cohere,
    Scoring,
    Images,
    Embedding,
    Infer,
    KServe,
    Models,
    Ollama,
    Health,
    Requests,
)
"""All surfaces, in order. The first one renders the errors of unknown paths."""


def build_surfaces(options: Options, desk: BatchDesk | None = None) -> Sequence[Surface]:
    """Build all surfaces, preceded by the auto-batching proxy's unless `embed_dialect` is "tei". `desk`: the batches of
    this process; None if another process has them."""
    surfaces = [Batches(options, desk) if make is Batches else make(options) for make in SURFACES]
    return override_paths(AutoBatchingProxy(options), surfaces) if options.embed_dialect != "tei" else surfaces


__all__ = [
    "SURFACES",
    "Application",
    "ImageReader",
    "Options",
    "Reply",
    "Request",
    "Surface",
    "build_app",
    "build_surfaces",
]
