"""One language model of a Reef server as a text generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from shoal.backends.base.http_client import Client
from shoal.core.protocols import GeneratorFacts, Piece, Prompt
from shoal.types import Context, Sampling

from .client import stream_completion


class ReefGenerator:
    """Streams the text of an answer; `aclose` closes `client`."""

    def __init__(self, client: Client, model: str) -> None:
        self.facts = GeneratorFacts(name=f"{client.base} ({model})", parameters=frozenset({"max_tokens"}))
        self._client, self._model = client, model

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        body = {"model": self._model, "prompt": prompt.text, "max_tokens": sampling.max_tokens}
        async with aclosing(stream_completion(self._client, body, ctx.deadline)) as texts:
            async for text in texts:
                yield Piece(text=text)

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        await self._client.aclose()
