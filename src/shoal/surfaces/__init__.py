"""The wire APIs that clients speak. One file and one entry here make a surface."""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.protocols import Surface
from shoal.surfaces._http import Front, build_app
from shoal.surfaces._request import Options, Reply, Request
from shoal.surfaces.embedding import Embedding
from shoal.surfaces.health import Health
from shoal.surfaces.infer import Infer
from shoal.surfaces.models import Models
from shoal.surfaces.ollama import Ollama
from shoal.surfaces.openai import OpenAI
from shoal.surfaces.tei import Tei

SURFACES: tuple[Callable[[Options], Surface], ...] = (OpenAI, Tei, Embedding, Infer, Models, Ollama, Health)
"""The first one answers for paths that nobody knows."""

__all__ = ["SURFACES", "Front", "Options", "Reply", "Request", "Surface", "build_app"]
