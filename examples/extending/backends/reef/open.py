"""Puts a model of a Reef server together: one replica for each address."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.backends import parse_served
from shoal.backends.base.backend import Resources, Target
from shoal.backends.base.chat_pipeline import load_chat_pipeline
from shoal.backends.base.http_client import Client
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts, Runner
from shoal.errors import SetupError
from shoal.models.address import Address, ServedModel
from shoal.pipelines.text.strings import StringPipeline, StringSpec

from .client import Listed, list_models
from .engine import ReefEngine
from .generator import ReefGenerator

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


async def list_offers(address: Address) -> dict[str, ServedModel | str]:
    client = Client(f"http://{address.target}")
    try:
        return {each.name: parse_served(f"{address}#{each.name}") for each in await list_models(client)}
    finally:
        await client.aclose()


async def open_model(target: Target, resources: Resources) -> Runner:
    clients = [Client(f"http://{address.target}") for address in target.addresses]
    try:
        return await _assemble(target, resources, clients)
    except BaseException:
        for client in clients:
            await client.aclose()
        raise


async def _assemble(target: Target, resources: Resources, clients: Sequence[Client]) -> Runner:
    name = target.addresses[0].model
    found = [await _find_model(client, name) for client in clients]
    kind = found[0].kind
    if any(each != found[0] for each in found):
        raise SetupError(f"the servers of {target.source} do not have the same model {name!r}")
    facts = ModelFacts(
        source=target.source,
        backend="reef",
        tasks=("embed",) if kind == "embed" else ("generate",),
        id=name,
        dimension=found[0].dimension or None,
    )
    if kind == "chat":
        pipeline = load_chat_pipeline(None, target.settings, template=TEMPLATE)
        return resources.generation(target, pipeline, [ReefGenerator(client, name) for client in clients], facts)
    texts = StringPipeline(StringSpec(dimension=found[0].dimension), truncate=target.settings.truncate)
    engines = [ReefEngine(client, name, found[0].dimension) for client in clients]
    return LaneRunner(resources.lane(target, texts, engines, facts), facts)


async def _find_model(client: Client, name: str) -> Listed:
    listed = await list_models(client)
    for each in listed:
        if each.name == name:
            return each
    raise SetupError(f"the server has no model {name!r}; it has {', '.join(each.name for each in listed)}")
