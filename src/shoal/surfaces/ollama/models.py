"""Ollama's routes about models: which there are, what is known of each, getting and deleting them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from shoal._version import __version__
from shoal.core.lifecycle.lifecycle import Job, Listing
from shoal.core.protocols import ModelFacts
from shoal.errors import Forbidden, InvalidValue, ModelNotFound, ModelNotReady, ShoalError, Unauthorized
from shoal.http.json import decoder
from shoal.http.redaction import redacted
from shoal.http.request import Reply, Request
from shoal.surfaces.ollama import wire
from shoal.surfaces.ollama.answers import ENCODE, stamp
from shoal.surfaces.ollama.names import LIBRARY, is_librarys, match, quantization, tagged, untagged
from shoal.surfaces.shared import model_jobs
from shoal.surfaces.shared.listing import listing
from shoal.types import TaskKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

NDJSON = (b"content-type", b"application/x-ndjson")

API_VERSION = "0.17.4"
"""Clients ask for the version to learn what they may ask for. This is the one whose requests are understood here."""

_CLIENT = re.compile(rb"ollama/(\d+\.\d+\.\d+[0-9A-Za-z.+-]{0,32}) ")
"""How Ollama's own client says who it is. It warns of any server that has not its version, older or newer."""

FOREVER = "9999-12-31T23:59:59Z"
"""Of a model that nobody puts to sleep."""

_USABLE = {"loaded", "sleeping", "loading", "unloading", "unloaded"}
_LOOK_S = 0.2  # how often a pull is looked at
_SHOWN = 200


def find(gateway: Gateway, name: str, task: TaskKind) -> tuple[str, str]:
    """The served model and the adapter that a client means. Raises ModelNotFound in the words by which Ollama's
    clients know it, ModelNotReady, and InvalidValue where none is named."""
    if not name:
        raise InvalidValue("model is required", param="model")
    plain = untagged(name)
    try:
        return gateway.resolve(plain, task)
    except ModelNotFound as error:
        if found := _meant(gateway, plain):
            return gateway.resolve(found, task)
        raise _not_found(name, error.message.rpartition(" does not exist: ")[2]) from None


def _meant(gateway: Gateway, name: str) -> str | None:
    """The served model that a name with a quantization stands for, or a name of Ollama's library."""
    base, form = quantization(name)
    model = gateway.registry.get(base) if form else None
    if model is not None:
        facts = model.card().facts
        return model.name if facts is None or facts.precision.upper() in (form, "") else None
    served = {card.name: [card.name, *card.aliases, *_source_names(card)] for card in gateway.models()}
    return match(name, served)


def _source_names(card: ModelCard) -> list[str]:
    facts = card.facts
    return [facts.id, facts.source.partition(":")[2].partition("@")[0]] if facts is not None else []


async def available(gateway: Gateway, request: Request, name: str, task: TaskKind) -> tuple[str, str]:
    """As `find`, but a model that lies on disk is loaded first, as Ollama does; that needs the right to load models.

    Raises what its loading failed with, too.
    """
    try:
        return find(gateway, name, task)
    except (ModelNotFound, ModelNotReady):
        plain = quantization(untagged(name))[0]
        plain = LIBRARY.get(plain, plain)
        if not await _on_disk(gateway, plain):
            raise
    try:
        request.demand("admin")
    except (Unauthorized, Forbidden) as refusal:
        raise _not_found(name, f"it is on disk and not loaded. {refusal.message}") from None
    job = model_jobs.lifecycle_of(gateway).load(plain)
    await model_jobs.settle(request, job, wait=True)
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
        self._decode = decoder.Decoder(wire.OllamaNamed, "ollama")

    async def version(self, request: Request) -> Reply:
        client = _CLIENT.match(request.headers.get(b"user-agent", b""))
        return model_jobs.encoded(
            wire.OllamaVersion(version=client[1].decode() if client else API_VERSION, shoal=__version__)
        )

    async def tags(self, request: Request) -> Reply:
        every = await listing(self._gateway)
        served = {each.source for each in every if each.status != "unloaded"}
        found = [
            _entry(each, name)
            for each in every
            # Files that are served under another name are that model's.
            if each.status in _USABLE
            and (each.status != "unloaded" or (each.source not in served and _may_load(request)))
            for name in _names(each)
        ]
        return model_jobs.encoded(wire.OllamaTags(models=found))

    async def running(self, request: Request) -> Reply:
        found = [
            _running(each, self._expires_at(each.name))
            for each in await listing(self._gateway)
            if each.status == "loaded"
        ]
        return model_jobs.encoded(wire.OllamaPs(models=found))

    def _expires_at(self, name: str) -> str:
        lifecycle = self._gateway.lifecycle
        left = lifecycle.stays_s(name) if lifecycle is not None and self._gateway.registry.get(name) else None
        return FOREVER if left is None else stamp(time.time_ns() + round(left * 1e9))

    async def show(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        name = _named(asked.model, asked.name)
        return model_jobs.encoded(_shown(await self._known(name)))

    async def _known(self, name: str) -> Listing:
        """Raises ModelNotFound and ModelNotReady."""
        missing: ShoalError
        try:
            plain, _ = find(self._gateway, name, "generate")
        except (ModelNotFound, ModelNotReady) as error:
            plain, missing = quantization(untagged(name))[0], error
            plain = LIBRARY.get(plain, plain)
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
        self._decode_pull = decoder.Decoder(wire.OllamaPullRequest, "ollama")
        self._decode_name = decoder.Decoder(wire.OllamaNamed, "ollama")

    async def pull(self, request: Request) -> Reply:
        """Also loads it: a client that pulled a model asks it next, maybe without the right to load it."""
        asked = await self._decode_pull.in_turns(request.body)
        name, form = self._source(_named(asked.model, asked.name))
        job = model_jobs.lifecycle_of(self._gateway).load(name)
        check = partial(self._check_form, job, form)
        if asked.stream is False:
            await model_jobs.settle(request, job, wait=True)
            check()
            return model_jobs.encoded(wire.OllamaProgress(status="success"))
        request.handed_over, request.model = True, job.model
        return Reply(200, [NDJSON], progress(job, check))

    def _source(self, asked: str) -> tuple[str, str]:
        """What to load for a name, and the quantization that it asks for. Raises InvalidValue."""
        plain = untagged(asked)
        if self._gateway.registry.get(plain) is None and (meant := _meant(self._gateway, plain)):
            return meant, ""
        name, form = quantization(plain)
        name = LIBRARY.get(name, name)
        if is_librarys(name):
            raise InvalidValue(
                f"'{asked[:_SHOWN]}' is a name of Ollama's library, which models are not pulled from here: name a "
                "repository of the Hugging Face hub, as hf.co/org/name",
                param="model",
            )
        return model_jobs.checked_source(name), form

    def _check_form(self, job: Job, form: str) -> None:
        """Raise InvalidValue where another quantization was loaded than the one that the name asked for."""
        model = self._gateway.registry.get(job.model) if form else None
        facts = model.card().facts if model is not None else None
        if facts is not None and facts.precision.upper() not in (form, ""):
            raise InvalidValue(
                f"{job.model} is loaded as {facts.precision.upper()}, and not as {form}: of several GGUF files the "
                f"Q4_K_M is taken. Ask for it as {job.model}",
                param="model",
            )

    async def delete(self, request: Request) -> Reply:
        asked = await self._decode_name.in_turns(request.body)
        name = _named(asked.model, asked.name)
        job = model_jobs.lifecycle_of(self._gateway).delete(model_jobs.checked_name(untagged(name)))
        await model_jobs.settle(request, job, wait=True)
        if not job.changed:
            raise _not_found(name, "")
        return Reply(200)


async def progress(job: Job, check: Callable[[], None]) -> AsyncGenerator[bytes]:
    """How a load goes, line by line; `check` raises what is wrong with one that is done. A client that leaves stops
    reading, and not the load."""
    yield _line(wire.OllamaProgress(status="pulling manifest"))
    told: wire.OllamaProgress | None = None
    over = asyncio.create_task(job.over.wait())
    try:
        while not over.done():
            now = _stage(job)
            if now != told and now.status:
                if full := _filled(told, now):
                    yield _line(full)
                told = now
                yield _line(now)
            await asyncio.wait({over}, timeout=_LOOK_S)
    finally:
        over.cancel()
    try:
        if job.error is not None:
            raise job.error
        check()
    except ShoalError as error:
        yield _line(wire.OllamaError(error=redacted(error.message)))
        return
    if full := _filled(told, None):
        yield _line(full)
    yield _line(wire.OllamaProgress(status="success"))


def _filled(last: wire.OllamaProgress | None, now: wire.OllamaProgress | None) -> wire.OllamaProgress | None:
    """The last line of a bar that was not seen full, once another one begins or everything is done."""
    if (
        last is None
        or not last.total
        or last.completed == last.total
        or (now is not None and now.digest == last.digest)
    ):
        return None
    return msgspec.structs.replace(last, completed=last.total)


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
        digest=_digest(each, name.rpartition(":")[2]),
        details=_details(each.facts),
        capabilities=_capabilities(each.facts),
    )


def _running(each: Listing, expires_at: str) -> wire.OllamaRunning:
    name = tagged(each.name)
    return wire.OllamaRunning(
        name=name,
        model=name,
        size=each.size,
        digest=_digest(each),
        details=_details(each.facts),
        expires_at=expires_at,
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
    if parameters := _parameters(facts):
        info["general.parameter_count"] = parameters
    return wire.OllamaShown(
        modelfile=f"FROM {redacted(each.source)}\n" if each.source else "",
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
        parameter_size=_billions(_parameters(facts)),
        quantization_level=facts.precision.upper() if facts is not None else "",
    )


def _capabilities(facts: ModelFacts | None) -> list[str]:
    """Ollama's client embeds with every model that has "embedding", so that one that answers must not."""
    tasks: Collection[str] = facts.tasks if facts is not None else ()
    found = ["completion"] if "generate" in tasks else ["embedding"] if "embed" in tasks else []
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


def _parameters(facts: ModelFacts | None) -> int:
    return _number(facts, "parameter_count") or _number(facts, "parameters")


def _billions(parameters: int) -> str:
    """As "7.6B" or "22.7M"."""
    if not parameters:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _digest(each: Listing, tag: str = "latest") -> str:
    """Of the model's files, or where they are not here of its source; clients show its beginning, and cannot do without
    one. The same whatever the model is called and does just now."""
    digest = each.digest or _hash(each.source)
    return digest if tag == "latest" else _hash(digest, tag)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
