"""Opens models of OpenAI-compatible servers: discovers their tasks, and builds the runners and the facts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.backends import parse_address
from shoal.backends.base.backend import Target
from shoal.backends.base.backoff import Notify, find_first, retry_pauses
from shoal.backends.base.http_answer import Answer, quote_message, rejected_key_error
from shoal.backends.base.http_client import Client
from shoal.backends.base.limits import describe_limits
from shoal.backends.base.served_name import served_name
from shoal.backends.base.tokenizer import load_tokenizer
from shoal.backends.openai.errors import lacks_model, lacks_route
from shoal.backends.openai.open_lanes import PROBE_S, MakeLane, Servers, open_embedder, open_scorer
from shoal.backends.openai.replicas import Replica, ServerPool
from shoal.backends.openai.routes import Kind, Route, find_score_routes
from shoal.backends.openai.runner import OPTIONAL, PATHS, UpstreamOptions, UpstreamRunner
from shoal.backends.openai.stream_passthrough import RESPONSES
from shoal.backends.openai.wire import ModelsWire, ModelWire
from shoal.config.settings import ModelTable, Settings
from shoal.core.closing import close_all
from shoal.core.probe import TEXTS
from shoal.core.protocols import ModelFacts, Runner
from shoal.core.routing import TaskRouter
from shoal.decoding import json_decoder
from shoal.errors import AddressError, CapacityError, ConfigError, DeadlineExceeded, EngineFailed, TransportFailed
from shoal.models.address import Address, ServedModel, check_name
from shoal.types import TaskKind

_MODELS = json_decoder(ModelsWire)

logger = logging.getLogger("shoal.openai")

ASK_S = 10.0
"""Timeout in seconds of a request that costs no token."""

DEFAULT_PATH = "/v1"
"""Path of an address without one."""

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the server may answer differently later."""


@dataclass(frozen=True, slots=True)
class _Discovery:
    """Facts of the model from the first server that answers. `listed` is None if the server does not list the model.
    `routes` are those that may score. `is_llama_cpp`: whether it is llama.cpp's server."""

    number: int
    tasks: tuple[TaskKind, ...]
    listed: ModelWire | None
    routes: Sequence[Route] = ()
    is_llama_cpp: bool = False


class _NotReadyYet(Exception):
    """The server is reachable, but cannot yet answer whether it supports the model."""


class UpstreamModel(TaskRouter):
    """The runners of one model and their shared connections."""

    def __init__(self, runners: Sequence[Runner], connections: AsyncExitStack) -> None:
        super().__init__(runners)
        self._connections = connections

    @property
    def facts(self) -> ModelFacts:
        """The facts, with the class names known so far."""
        facts = super().facts
        for runner in self._runners:  # a loop, since a generator would be another call of every request
            if labels := runner.facts.labels:
                return facts if facts.labels == labels else replace(facts, labels=labels)
        return facts

    async def aclose(self) -> None:
        await close_all(super().aclose, self._connections.aclose)


async def open_upstream(target: Target, lane: MakeLane, note: Notify) -> Runner:
    """Open a model once one of its servers reports its tasks; the others join when they come up and agree.

    Waits without limit while no server is reachable, and passes the reason to `note`. Raises SetupError if a server is
    reachable and the model cannot be served. No request sent here makes a server generate.
    """
    async with AsyncExitStack() as opened:
        clients = []
        for address in target.addresses:
            clients.append(make_client(address, target.settings))
            opened.push_async_callback(clients[-1].aclose)
        for pause in retry_pauses():
            found = await _find_first_server(target, clients, note)
            try:
                runners = await _open_runners(target, clients, found, lane)
                return UpstreamModel(runners, opened.pop_all())
            except (TransportFailed, CapacityError) as error:  # lost or busy before its first answer
                note(f"waiting for {target.addresses[found.number]}: {error.message}")
            await asyncio.sleep(pause)
    raise AssertionError("the retry loop never ends")


async def list_offers(address: Address, settings: Settings) -> dict[str, ServedModel | str]:
    """Return the models a server lists, by served name: the model, or the reason it cannot be served.

    Raises TransportFailed and DeadlineExceeded if the server is unreachable, ConfigError if it lists no models.
    """
    client = make_client(address, settings)
    try:
        answer = await client.get("/models", time.monotonic() + ASK_S)
    finally:
        await client.aclose()
    if key := rejected_key_error(answer, client.base):
        raise ConfigError(key.message)
    if answer.status in BUSY:
        raise TransportFailed(f"{client.base}/models returns status {answer.status}{quote_message(answer)}: try again")
    listed = _parse_model_list(answer)
    if listed is None:
        raise ConfigError(f"{address} does not list its models: name the one to serve, as {address}#MODEL")
    found: dict[str, ServedModel | str] = {}
    # Models that keep their names come first, so that no other model is served under one of these names.
    for model in sorted({one.id: None for one in listed}, key=lambda model: served_name(model) != model):
        name = served_name(model)
        here = msgspec.structs.replace(address, model=model)
        try:
            check_name(name)
            if parse_address(str(here)) != here:
                raise AddressError(f"{model!r} cannot be written in an address")
            if name in found:
                raise AddressError(f"another model is already served as {name}: give this one a name, NAME={here}")
            found[name] = ServedModel(name=name, addresses=(here,))
        except AddressError as error:
            found[model] = error.message
    return found


def make_client(address: Address, settings: Settings) -> Client:
    """Return the client of a server. Raises ConfigError for a key that cannot be sent in a header."""
    scheme = address.scheme.removeprefix("openai+")
    path = "" if "/" in address.target else DEFAULT_PATH
    return Client(
        f"{scheme}://{address.target}{path}",
        key=settings.upstream_api_key,
        connect_timeout_s=settings.connect_timeout_s,
    )


async def _find_first_server(target: Target, clients: Sequence[Client], note: Notify) -> _Discovery:
    """Return the discovery of the first server that answers."""

    async def ask(number: int) -> _Discovery:
        return await _discover(clients[number], target.addresses[number].model, target.table, number)

    waits = (TransportFailed, DeadlineExceeded, EngineFailed, _NotReadyYet)
    return (await find_first(ask, target.addresses, waits, note))[1]


async def _discover(client: Client, model: str, table: ModelTable, number: int) -> _Discovery:
    """Ask a server for the model's tasks. Raises TransportFailed, DeadlineExceeded, EngineFailed and _NotReadyYet while
    they cannot be determined, ConfigError if the model cannot be served."""
    answer = await client.get("/models", time.monotonic() + ASK_S)
    if answer.status in BUSY:
        raise _NotReadyYet(f"/models returns status {answer.status}{quote_message(answer)}")
    listed = _parse_model_list(answer) or []
    own = next((one for one in listed if one.id == model), None)
    is_llama_cpp = any(one.owned_by == "llamacpp" for one in listed)  # it answers to any name
    if tasks := table.tasks or (own.supported_tasks if own is not None else ()):
        kinds = [
            kind for kind, does in _ROUTE_TASKS.items() if does in tasks or (kind == "classify" and "rerank" in tasks)
        ]
        routes, unsure = await find_score_routes(client, model, kinds, ASK_S)
        if kinds and not routes:
            _raise_if_unsure(unsure, client, "score")
        return _Discovery(number, tasks, own, routes, is_llama_cpp)
    embeds = await _embeds(client, model)
    generates = await _generates(client, model)
    answers: dict[TaskKind, bool | Answer] = {"embed": embeds, "generate": generates}
    tasks = tuple(task for task, outcome in answers.items() if outcome is True)
    routes, unsure = ([], []) if tasks else await find_score_routes(client, model, tuple(_ROUTE_TASKS), ASK_S)
    if routes:  # with many models behind one server, only scoring real texts shows which of them score
        tasks = ("rerank", "classify")
    for task, outcome in answers.items():
        if isinstance(outcome, Answer) and (why := _retry_reason(outcome, client, tasks)):
            raise _NotReadyYet(f"cannot find out whether it can {task}: {why}{_TASKS_HINT if tasks else ''}")
    if tasks:
        return _Discovery(number, tasks, own, routes, is_llama_cpp)
    if not any(
        isinstance(outcome, Answer) and rejected_key_error(outcome, client.base) for outcome in answers.values()
    ):
        _raise_if_unsure(unsure, client, "score")
    raise ConfigError(_no_task_message(client, model, generates, [one.id for one in listed]))


_ROUTE_TASKS: dict[Kind, TaskKind] = {"score": "rerank", "rerank": "rerank", "classify": "classify"}
"""The task of each scoring route, the preferred route first."""


def _raise_if_unsure(unsure: Sequence[Answer], client: Client, task: str) -> None:
    """Raise _NotReadyYet if the server may answer one of these requests differently later."""
    for answer in unsure:
        key = rejected_key_error(answer, client.base)
        why = key.message if key else f"it returns status {answer.status}{quote_message(answer)}"
        raise _NotReadyYet(f"cannot find out whether it can {task}: {why}")


_TASKS_HINT = "; if it cannot, set the model's `tasks` in shoal.toml"


def _retry_reason(answer: Answer, client: Client, tasks: Sequence[TaskKind]) -> str:
    """Return why a rejection may be temporary, or "" if it is final. `tasks`: the known tasks of the model."""
    if tasks and (key := rejected_key_error(answer, client.base)):
        return key.message
    # Some servers answer 500 for a task they do not support; if the model has another task, a 500 means that.
    if answer.status in (BUSY - {500} if tasks else BUSY):
        return f"it returns status {answer.status}{quote_message(answer)}"
    return ""


def _no_task_message(client: Client, model: str, answer: Answer | bool, names: Sequence[str]) -> str:
    """Return the reason why the model has no task that Shoal supports."""
    assert isinstance(answer, Answer)
    if key := rejected_key_error(answer, client.base):
        return key.message
    if names and model not in names:
        return f"the server at {client.base} has no model {model!r}; it has {', '.join(names[:20])}"
    return (
        f"{model} at {client.base} neither embeds, scores nor chats{quote_message(answer)}: check the name and the"
        " path, or set the model's `tasks` in shoal.toml"
    )


async def _embeds(client: Client, model: str) -> bool | Answer:
    """Return True if the model embeds, else the server's answer."""
    body = msgspec.json.encode({"model": model, "input": [TEXTS[0]]})
    answer = await client.post("/embeddings", body, time.monotonic() + PROBE_S)
    return True if answer.status == 200 and b'"embedding"' in answer.body else answer


async def _generates(client: Client, model: str) -> bool | Answer:
    """Return True if the model generates, else the server's answer. The request has no messages and `max_tokens` 0, so
    a server rejects it or does nothing; the result depends on whether it rejects the route or the model."""
    body = msgspec.json.encode({"model": model, "messages": [], "max_tokens": 0})
    answer = await client.post("/chat/completions", body, time.monotonic() + ASK_S)
    # A server that answers 500 to an empty conversation has the route.
    if rejected_key_error(answer, client.base) or answer.status in BUSY - {500}:
        return answer
    return answer if lacks_model(answer) or lacks_route(answer) else True


def _parse_model_list(answer: Answer) -> list[ModelWire] | None:
    """Return the models of a list, or None if the answer is not one."""
    if answer.status != 200:
        return None
    try:
        return _MODELS.decode(answer.body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def _open_runners(target: Target, clients: Sequence[Client], found: _Discovery, lane: MakeLane) -> list[Runner]:
    facts = _build_facts(target, found)
    servers = Servers(target=target, clients=clients, number=found.number)
    tasks = set(found.tasks)
    runners: list[Runner] = []
    async with AsyncExitStack() as opened:
        counter = (
            None if tasks == {"generate"} else await asyncio.to_thread(load_tokenizer, target.settings, target.table)
        )
        if "embed" in tasks:
            embedder = await open_embedder(servers, facts, counter, lane)
            opened.push_async_callback(embedder.aclose)
            runners.append(embedder)
            facts = embedder.facts
        if tasks & {"rerank", "classify"}:
            labels = found.listed.classes if found.listed is not None else ()
            scores = replace(facts, tasks=tuple(task for task in found.tasks if task in ("rerank", "classify")))
            scorer = await open_scorer(servers, scores, counter, lane, routes=found.routes, labels=labels)
            opened.push_async_callback(scorer.aclose)
            runners.append(scorer)
            facts = facts if "embed" in tasks else scorer.facts
        if "generate" in tasks:
            runners.append(_open_generator(target, clients, found, replace(facts, tasks=("generate",), labels=())))
        opened.pop_all()
    return runners


def _open_generator(target: Target, clients: Sequence[Client], found: _Discovery, facts: ModelFacts) -> UpstreamRunner:
    table, settings = target.table, target.settings
    adapters = {name: str(there) for name, there in table.adapters.items()}
    fleet = ServerPool(
        [Replica(client, address.model, adapters) for client, address in zip(clients, target.addresses, strict=True)]
    )
    defaults: dict[str, Any] = dict(table.sampling)
    if settings.default_max_tokens:
        defaults.setdefault("max_tokens", settings.default_max_tokens)
    options = UpstreamOptions(
        strip=frozenset(settings.strip_parameters),
        defaults=defaults,
        first_token_timeout_s=settings.first_token_timeout_s,
        routing=settings.replica_routing,
        translates=_list_translated(target, found),
        names_tools=not found.is_llama_cpp,
    )
    fleet.start()
    return UpstreamRunner(fleet, facts, options)


def _build_facts(target: Target, found: _Discovery) -> ModelFacts:
    table = target.table
    listed = found.listed
    return ModelFacts(
        id=target.addresses[found.number].model,
        source=target.source,
        backend="openai",
        knows_token_ids=True,
        passes=tuple(each for each in PATHS if each not in _list_translated(target, found))
        if "generate" in found.tasks
        else (),
        tasks=found.tasks,
        context_tokens=(
            table.context_tokens
            or (listed.context_limit if listed else None)
            or table.for_language_model.context_tokens
        )
        if "generate" in found.tasks
        else None,
        max_input_tokens=(table.max_tokens or (listed.input_limit if listed else None))
        if set(found.tasks) - {"generate"}
        else None,
        adapters=tuple(sorted(table.adapters)) if "generate" in found.tasks else (),
        details={
            **describe_limits(target.settings),
            "model": target.addresses[found.number].model,
            "servers": [str(address) for address in target.addresses],
            **({"vision": True} if _accepts_images(table, found) else {}),
        },
    )


def _accepts_images(table: ModelTable, found: _Discovery) -> bool:
    """Return whether chats may hold images: as the model's table says, else as the server lists it."""
    if "generate" not in found.tasks:
        return False
    return found.listed is not None and found.listed.accepts_images if table.vision is None else table.vision


def _list_translated(target: Target, found: _Discovery) -> frozenset[str]:
    """Return the dialects that are converted to chat completions.

    llama.cpp's routes for them leave out what its chat completions do: forms of the answer, calls that are ruled out,
    thinking that is switched off, and that the answer was cut.
    """
    if found.is_llama_cpp:
        return OPTIONAL
    return frozenset((RESPONSES,) if target.settings.translate_responses else ())
