"""Entries of models, by state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.gateway import Gateway
from shoal.core.lifecycle.lifecycle import Listing
from shoal.core.protocols import ModelFacts
from shoal.core.registry import Model, ModelCard, Registry
from shoal.errors import ModelFileError, TransportFailed
from shoal.surfaces.shared import listing
from shoal.surfaces.shared.wire_models import ModelStatus


def card(model: Model) -> ModelCard:
    return model.card()


@pytest.mark.parametrize("state", ["loading", "unloading", "failed"])
def test_served_but_not_loaded(state: str) -> None:
    """Loading is told as it is; what goes away or failed is unloaded, the latter with its reason."""
    model = Model(name="m")
    if state == "failed":
        model.mark_failed(ModelFileError("is missing", file="config.json"))
    elif state == "unloading":
        model.transition("unload")
    status = listing.build_entry(card(model), ()).status
    if state == "failed":
        assert status == ModelStatus(value="unloaded", failed=True, error="config.json: is missing")
    else:
        assert status == ModelStatus(value="loading" if state == "loading" else "unloaded")


def test_asleep() -> None:
    """A model that rests is sleeping, whatever it is about to do."""
    model = Model(name="m", is_sleeping=True, note="making room")
    assert listing.build_entry(card(model), ()).status == ModelStatus(value="sleeping", note="making room")


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("loaded", ModelStatus(value="loaded")),
        ("sleeping", ModelStatus(value="sleeping")),
        ("unloading", ModelStatus(value="unloaded")),
        ("failed", ModelStatus(value="unloaded", failed=True)),
        ("loading", ModelStatus(value="loading", progress={"stages": [], "current": "", "value": 0.5})),
        ("downloading", ModelStatus(value="downloading", progress={"hf:m": {"done": 0, "total": 0}})),
    ],
)
async def test_states_of_a_listing(status: str, shown: ModelStatus) -> None:
    """The router's words for each."""

    class FakeLifecycle:
        def jobs(self) -> list[object]:
            return []

        async def listing(self) -> list[Listing]:
            fraction = 0.5 if status in ("loading", "downloading") else None
            return [Listing(name="m", source="hf:m", backend="local", status=status, fraction=fraction)]  # type: ignore[arg-type]

    gateway = Gateway(Registry())
    gateway.lifecycle = FakeLifecycle()  # type: ignore[assignment]
    (entry,) = await listing.list_all_entries(gateway)
    assert entry.status == shown


async def test_a_backend_that_fails() -> None:
    """Its error is not the list's: what is served is shown."""

    class FakeLifecycle:
        async def listing(self) -> list[Listing]:
            raise TransportFailed("Triton is gone")

    registry = Registry()
    registry.add(Model(name="m", aliases=("a",)))
    gateway = Gateway(registry)
    gateway.lifecycle = FakeLifecycle()  # type: ignore[assignment]
    (shown,) = await listing.list_models(gateway)
    assert (shown.name, shown.status, shown.aliases) == ("m", "loading", ("a",))


@pytest.mark.parametrize(
    ("tasks", "outputs"),
    [
        ([], ["embeddings"]),
        (["embed"], ["embeddings"]),
        (["generate"], ["text"]),
        (["embed", "generate"], ["text", "embeddings"]),
    ],
)
def test_architecture(tasks: list[str], outputs: list[str]) -> None:
    """What goes out follows from the tasks; a model that was never loaded is taken for an encoder."""
    assert listing._architecture(tasks, None).output_modalities == outputs


def test_input_kinds_follow_from_the_facts() -> None:
    """Text alone is not said beside the facts, since every model of Shoal's was that."""
    facts = ModelFacts(source="s", backend="fake", tasks=("embed",), modalities=("text", "image"))
    assert listing._architecture(["embed"], facts).input_modalities == ["text", "image"]
    entry = listing._entry("m", 0, listing._UNRESPONSIVE)
    listing._add_facts(entry, facts)
    assert entry.modalities == ["text", "image"]
    listing._add_facts(entry, replace(facts, modalities=("text",)))
    assert (entry.modalities, entry.vision) == ([], False)


def test_chats_that_take_images() -> None:
    """Images of chats are apart from those that a model embeds."""
    facts = ModelFacts(source="s", backend="fake", tasks=("generate",), details={"vision": True})
    entry = listing._entry("m", 0, listing._UNRESPONSIVE)
    listing._add_facts(entry, facts)
    assert (entry.modalities, entry.vision) == ([], True)
    assert listing._architecture(["generate"], facts).input_modalities == ["text", "image"]
