"""Which models may evict which, and which requests wait in vain."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import Unavailable, Unsupported
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context
from tests.unit.core.lives import Stack


def test_a_tokenizer_wakes_its_model_and_keeps_it_awake(virtual: Run[None]) -> None:
    """Any use of a model, such as its tokenizer, counts as a request."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        await stack.loaded("a", "b")
        shown: list[str] = []

        async def use() -> None:
            with pytest.raises(Unsupported, match="'a' does not expose"):
                async with stack.gateway.using_codec("a", context()):
                    shown.append("a")

        assert stack.state("a") == "unloaded"
        await use()
        assert (stack.states("a", "b"), shown) == (["ready", "unloaded"], [])
        model = stack.registry.get("a")
        assert model is not None
        assert model.inflight == 0

    virtual(main)


def test_a_load_without_memory_fails_at_its_deadline(virtual: Run[None]) -> None:
    """If all loaded models stay busy, the request fails with the reason, and the next one tries again."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        stack.loads.infer_s = 1.0
        await stack.loaded("a", "b")
        over = asyncio.get_running_loop().time() + 60

        async def busy(late: float) -> None:
            await asyncio.sleep(late)
            while asyncio.get_running_loop().time() < over:
                await stack.ask("b")

        crowd = [asyncio.create_task(busy(late)) for late in (0.0, 0.3, 0.6)]
        for _ in range(2):
            await asyncio.sleep(1)
            with pytest.raises(Unavailable, match=r"all loaded models stayed busy.* max_loaded_models") as caught:
                await stack.ask("a", 10)
            assert caught.value.retry_after == 2.0
        await asyncio.sleep(1)
        assert (stack.states("a", "b"), stack.idle()) == (["unloaded", "ready"], True)
        waiting = asyncio.create_task(stack.ask("a", 100))
        await asyncio.gather(*crowd)
        assert (await waiting).tokens == [1]
        assert stack.loads.runners[1].answered_closed == 0

    virtual(main)
