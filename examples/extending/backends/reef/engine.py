"""One embedding model of a Reef server as an engine: a lane gives it the batches of all users."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.backends.base.http_client import Client
from shoal.backends.base.presence import Presence, PresenceMixin
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import UpstreamFailed
from shoal.types import Array

from .client import Vectors, decode, list_models

logger = logging.getLogger("shoal.reef")


class ReefEngine(PresenceMixin):
    """{"text": object array [rows] of str} to {"embedding": float32 [rows, dimension]}; `aclose` closes `client`."""

    def __init__(self, client: Client, model: str, dimension: int) -> None:
        self.facts = EngineFacts(
            name=f"{client.base} ({model})",
            inputs=("text",),
            outputs=("embedding",),
            slots=2,  # one batch more than the server computes at once
            parallel=1,
            max_batch_size=256,
            pads_batches=False,
        )
        self._client, self._model, self._dimension = client, model, dimension
        self._presence = Presence(self.facts.name, logger, look=self._look, admit=self._look, serving=True)
        self._presence.start(look_s=5.0, again_s=(1.0,))

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        texts = inputs["text"].tolist()
        body = msgspec.json.encode({"model": self._model, "texts": texts})
        with self._presence:
            rows = decode(await self._client.post("/vectors", body, deadline), Vectors).vectors
        if [len(row) for row in rows] != [self._dimension] * len(texts):
            raise UpstreamFailed(f"the server did not answer {len(texts)} vectors of {self._dimension} numbers")
        return {"embedding": np.array(rows, dtype=np.float32)}

    async def aclose(self) -> None:
        await super().aclose()
        await self._client.aclose()

    async def _look(self) -> None:
        await list_models(self._client)
