"""Ollama's routes about models: which there are, what is known of each, getting and deleting them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection
from typing import TYPE_CHECKING, Any

from shoal._version import __version__
from shoal.core.lifecycle import Job, Listing
from shoal.core.protocols import ModelFacts
from shoal.errors import Forbidden, InvalidValue, ModelNotFound, ModelNotReady, ShoalError, Unauthorized
from shoal.surfaces import _jobs, _wire
from shoal.surfaces import _wire_ollama as wire
from shoal.surfaces._listing import listing
from shoal.surfaces._ollama_answers import ENCODE, stamp
from shoal.surfaces._request import Reply, Request
from shoal.types import TaskKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

NDJSON = (b"content-type", b"application/x-ndjson")

API_VERSION = "0.12.11"
"""Clients ask for the version to learn what they may ask for. This is the one whose requests are understood here."""

FOREVER = "9999-12-31T23:59:59Z"
"""How long a model stays is the server's to decide, by what else is asked for."""

_USABLE = {"loaded", "sleeping", "loading", "unloaded"}
_LATEST = ":latest"
_HUBS = ("hf.co/", "huggingface.co/")
_LOOK_S = 0.2  # how often a pull is looked at
_SHOWN = 200


def untagged(name: str) -> str:
    """`name` without the tag that stands for the model itself, and as org/name where it has a hub's address before."""
    if name.count("/") > 1:
        for hub in _HUBS:
            name = name.removeprefix(hub)
    return name.removesuffix(_LATEST)


def tagged(name: str, adapter: str = "") -> str:
    """As Ollama lists it."""
    return f"{name}:{adapter}" if adapter else name + _LATEST


def find(gateway: Gateway, name: str, task: TaskKind) -> tuple[str, str]:
    """The served model and the adapter that a client means. Raises ModelNotFound in the words by which Ollama's
    clients know it, ModelNotReady, and InvalidValue where none is named."""
    if not name:
        raise InvalidValue("model is required", param="model")
    try:
        return gateway.resolve(untagged(name), task)
    except ModelNotFound as error:
        raise _not_found(name, error.message.partition(": ")[2]) from None


async def available(gateway: Gateway, request: Request, name: str, task: TaskKind) -> tuple[str, str]:
    """As `find`, but a model that lies on disk is loaded first, as Ollama does; that needs the right to load models.

    Raises what its loading failed with, too.
    """
    try:
        return find(gateway, name, task)
    except (ModelNotFound, ModelNotReady):
        plain = untagged(name)
        if not await _on_disk(gateway, plain):
            raise
    try:
        request.demand("admin")
    except (Unauthorized, Forbidden) as refusal:
        raise _not_found(name, f"it is on disk and not loaded. {refusal.message}") from None
    job = _jobs.lifecycle_of(gateway).load(plain)
    await _jobs.settle(request, job, wait=True)
    return find(gateway, name, task)


async def _on_disk(gateway: Gateway, name: str) -> bool:
    if gateway.lifecycle is None:
        return False
    return any(each.name == name and each.status == "unloaded" for each in await listing(gateway))


def _not_found(name: str, why: str) -> ModelNotFound:
    return ModelNotFound(f"model '{name[:_SHOWN]}' not found: {why or 'GET /api/tags lists those that are'}")


class Shelf:
    """What is there: lists, what is known of one, and the version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode = _wire.Decoder(wire.OllamaNamed, "ollama")

    async def version(self, request: Request) -> Reply:
        return _jobs.encoded(wire.OllamaVersion(version=API_VERSION, shoal=__version__))

    async def tags(self, request: Request) -> Reply:
        found = [
            _entry(each, name)
            for each in await listing(self._gateway)
            if each.status in _USABLE and (each.status != "unloaded" or _may_load(request))
            for name in _names(each)
        ]
        return _jobs.encoded(wire.OllamaTags(models=found))

    async def running(self, request: Request) -> Reply:
        found = [_running(each) for each in await listing(self._gateway) if each.status == "loaded"]
        return _jobs.encoded(wire.OllamaPs(models=found))

    async def show(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        name = _named(asked.model, asked.name)
        return _jobs.encoded(_shown(await self._known(name)))

    async def _known(self, name: str) -> Listing:
        """Raises ModelNotFound and ModelNotReady."""
        missing: ShoalError
        try:
            plain, _ = find(self._gateway, name, "generate")
        except (ModelNotFound, ModelNotReady) as error:
            plain, missing = untagged(name), error
        else:
            missing = _not_found(name, "")
        found = next((each for each in await listing(self._gateway) if each.name == plain), None)
        if found is None or found.status not in _USABLE:
            raise missing
        return found


class Moves:
    """Getting and deleting models."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_pull = _wire.Decoder(wire.OllamaPullRequest, "ollama")
        self._decode_name = _wire.Decoder(wire.OllamaNamed, "ollama")

    async def pull(self, request: Request) -> Reply:
        """Also loads it: a client that pulled a model asks it next, maybe without the right to load it."""
        asked = await self._decode_pull.in_turns(request.body)
        name = _jobs.checked_source(untagged(_named(asked.model, asked.name)))
        job = _jobs.lifecycle_of(self._gateway).load(name)
        if asked.stream is False:
            await _jobs.settle(request, job, wait=True)
            return _jobs.encoded(wire.OllamaProgress(status="success"))
        request.handed_over, request.model = True, job.model
        return Reply(200, [NDJSON], progress(job))

    async def delete(self, request: Request) -> Reply:
        asked = await self._decode_name.in_turns(request.body)
        name = _named(asked.model, asked.name)
        job = _jobs.lifecycle_of(self._gateway).delete(_jobs.checked_name(untagged(name)))
        await _jobs.settle(request, job, wait=True)
        if not job.changed:
            raise _not_found(name, "")
        return Reply(200)


async def progress(job: Job) -> AsyncGenerator[bytes]:
    """How a load goes, line by line. A client that leaves stops reading, and not the load."""
    yield _line(wire.OllamaProgress(status="pulling manifest"))
    told = None
    over = asyncio.create_task(job.over.wait())
    try:
        while not over.done():
            now = _stage(job)
            if now != told and now.status:
                told = now
                yield _line(now)
            await asyncio.wait({over}, timeout=_LOOK_S)
    finally:
        over.cancel()
    if job.error is not None:
        yield _line(wire.OllamaError(error=job.error.message))
    else:
        yield _line(wire.OllamaProgress(status="success"))


def _stage(job: Job) -> wire.OllamaProgress:
    said = wire.OllamaProgress(status=job.stage)
    if job.total:
        # Clients draw one bar for each digest.
        said.digest = "sha256:" + _hash(job.model, job.stage)
        said.total, said.completed = int(job.total), int(job.done or 0)
    return said


def _line(value: wire.OllamaProgress | wire.OllamaError) -> bytes:
    return ENCODE(value) + b"\n"


def _named(model: str | None, name: str | None) -> str:
    found = model or name
    if not found:
        raise InvalidValue("model is required", param="model")
    return found


def _may_load(request: Request) -> bool:
    try:
        request.demand("admin")
    except ShoalError:
        return False
    return True


# What is known of a model


def _names(each: Listing) -> list[str]:
    adapters = each.facts.adapters if each.facts is not None else ()
    return [tagged(each.name), *(tagged(each.name, adapter) for adapter in adapters)]


def _entry(each: Listing, name: str) -> wire.OllamaEntry:
    return wire.OllamaEntry(
        name=name,
        model=name,
        modified_at=stamp(each.created * 1_000_000_000),
        size=each.size,
        digest=_digest(each, name),
        details=_details(each.facts),
        capabilities=_capabilities(each.facts),
    )


def _running(each: Listing) -> wire.OllamaRunning:
    name = tagged(each.name)
    return wire.OllamaRunning(
        name=name,
        model=name,
        size=each.size,
        digest=_digest(each, name),
        details=_details(each.facts),
        expires_at=FOREVER,
        size_vram=0,
        context_length=_context(each.facts),
    )


def _shown(each: Listing) -> wire.OllamaShown:
    facts = each.facts
    family = _text(facts, "architecture") or "unknown"
    info: dict[str, Any] = {"general.architecture": family, "general.basename": each.name}
    if context := _context(facts):
        info[f"{family}.context_length"] = context
    if facts is not None and facts.dimension:
        info[f"{family}.embedding_length"] = facts.dimension
    if parameters := _number(facts, "parameter_count"):
        info["general.parameter_count"] = parameters
    return wire.OllamaShown(
        modelfile=f"FROM {each.source}\n" if each.source else "",
        parameters="",
        template=_text(facts, "chat_template"),
        license="",
        details=_details(facts),
        model_info=info,
        capabilities=_capabilities(facts),
        modified_at=stamp(each.created * 1_000_000_000),
    )


def _details(facts: ModelFacts | None) -> wire.OllamaDetails:
    family = _text(facts, "architecture")
    return wire.OllamaDetails(
        format=facts.backend if facts is not None else "",
        family=family,
        families=[family] if family else [],
        parameter_size=_billions(_number(facts, "parameter_count")),
        quantization_level=facts.precision.upper() if facts is not None else "",
    )


def _capabilities(facts: ModelFacts | None) -> list[str]:
    tasks: Collection[str] = facts.tasks if facts is not None else ()
    found = [word for task, word in (("generate", "completion"), ("embed", "embedding")) if task in tasks]
    details = facts.details if facts is not None else {}
    return found + [word for word in ("tools", "thinking", "vision") if details.get(word)]


def _context(facts: ModelFacts | None) -> int:
    return (facts.context_tokens or facts.max_input_tokens or 0) if facts is not None else 0


def _text(facts: ModelFacts | None, name: str) -> str:
    found = facts.details.get(name) if facts is not None else None
    return found if isinstance(found, str) else ""


def _number(facts: ModelFacts | None, name: str) -> int:
    found = facts.details.get(name) if facts is not None else None
    return found if isinstance(found, int) else 0


def _billions(parameters: int) -> str:
    """As "7.6B" or "22.7M"."""
    if not parameters:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _digest(each: Listing, name: str) -> str:
    """Equal for the same name, source and revision; clients show its beginning, and cannot do without one."""
    return _hash(name, each.source, each.facts.revision if each.facts is not None else "")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
