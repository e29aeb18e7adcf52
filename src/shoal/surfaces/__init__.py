"""The wire APIs that clients speak. One file and one entry here make a surface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core.protocols import Surface
from shoal.surfaces._http import Front, build_app
from shoal.surfaces._instead import instead
from shoal.surfaces._pictures import Pictures
from shoal.surfaces._request import Options, Reply, Request
from shoal.surfaces.auto_batching_proxy import AutoBatchingProxy
from shoal.surfaces.cohere import Cohere
from shoal.surfaces.embedding import Embedding
from shoal.surfaces.health import Health
from shoal.surfaces.images import Images
from shoal.surfaces.infer import Infer
from shoal.surfaces.models import Models
from shoal.surfaces.ollama import Ollama
from shoal.surfaces.openai import OpenAI
from shoal.surfaces.rerank import Ranking, Rerank
from shoal.surfaces.scoring import Scoring
from shoal.surfaces.tei import Tei

SURFACES: tuple[Callable[[Options], Surface], ...] = (
    OpenAI,
    Tei,
    Rerank,
    Ranking,
    Cohere,
    Scoring,
    Images,
    Embedding,
    Infer,
    Models,
    Ollama,
    Health,
)
"""The first one answers for paths that nobody knows."""


def surfaces_of(options: Options) -> Sequence[Surface]:
    """All of them, and before them the one whose dialect `embed_dialect` says /embed is."""
    surfaces = [make(options) for make in SURFACES]
    return instead(AutoBatchingProxy(options), surfaces) if options.embed_dialect != "tei" else surfaces


__all__ = ["SURFACES", "Front", "Options", "Pictures", "Reply", "Request", "Surface", "build_app", "surfaces_of"]
