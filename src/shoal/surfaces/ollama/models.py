"""Ollama's model routes: list, show, pull and delete models."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Collection, Container
from typing import TYPE_CHECKING, Any

import msgspec

from shoal._version import __version__
from shoal.core.lifecycle.lifecycle import Job, Listing
from shoal.core.protocols import ModelFacts
from shoal.errors import Forbidden, InvalidValue, ModelNotFound, ModelNotReady, NotAtSource, ShoalError, Unauthorized
from shoal.http.json import decoder
from shoal.http.redaction import redact
from shoal.http.request import Reply, Request
from shoal.surfaces.ollama import wire
from shoal.surfaces.ollama.chat_replies import ENCODE, format_timestamp
from shoal.surfaces.ollama.names import (
    LIBRARY,
    add_tag,
    is_library_name,
    match_library_name,
    show_name,
    split_quantization,
    strip_tag,
    to_served_name,
)
from shoal.surfaces.shared import model_jobs
from shoal.surfaces.shared.listing import list_models
from shoal.types import TaskKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

NDJSON = (b"content-type", b"application/x-ndjson")

API_VERSION = "0.17.4"
"""The version of Ollama's API that this surface supports. Clients check it to decide which requests they may send."""

_CLIENT = re.compile(rb"ollama/(\d+\.\d+\.\d+[0-9A-Za-z.+-]{0,32}) ")
"""The user agent of Ollama's own client, which warns about any server of another version, older or newer."""

FOREVER = "9999-12-31T23:59:59Z"
"""The expiry of a model that is never put to sleep."""

_USABLE = {"loaded", "sleeping", "loading", "unloading", "unloaded"}
_POLL_INTERVAL_S = 0.2  # how often the progress of a pull is checked
_MAX_SHOWN = 200
_LAST_STEPS = ("verifying sha256 digest", "writing manifest", "success")
"""What Ollama reports last. The first two are over by then: a small model is there before its progress is checked."""


def find_model(gateway: Gateway, name: str, task: TaskKind) -> tuple[str, str]:
    """Find the served model and the adapter that a client names.

    Raises ModelNotFound with the message that Ollama's clients recognize, ModelNotReady, and InvalidValue for an empty
    name.
    """
    if not name:
        raise InvalidValue("model is required", param="model")
    plain = strip_tag(name)
    try:
        return gateway.resolve(plain, task)
    except ModelNotFound as error:
        if found := _match_model(gateway, plain):
            return gateway.resolve(found, task)
        raise _not_found_error(name, error.message.rpartition(" does not exist: ")[2]) from None


def _match_model(gateway: Gateway, name: str) -> str | None:
    """Find the served model for a name with a quantization, or for a name of Ollama's library."""
    base, form = split_quantization(name)
    if form:
        if pulled := gateway.registry.get(to_served_name(name)):
            return pulled.name
        if model := gateway.registry.get(base):
            facts = model.card().facts
            return model.name if facts is None or facts.precision.upper() in (form, "") else None
        if "/" in base:  # a repository on the hub: its other quantizations are other models
            return None
    served = {card.name: [card.name, *card.aliases, *_source_names(card)] for card in gateway.models()}
    return match_library_name(name, served)


def _source_names(card: ModelCard) -> list[str]:
    facts = card.facts
    return [facts.id, facts.source.partition(":")[2].partition("@")[0]] if facts is not None else []


async def find_or_load(gateway: Gateway, request: Request, name: str, task: TaskKind) -> tuple[str, str]:
    """Find a model as `find_model` does, and load one that is only on disk, as Ollama does.

    Loading requires admin access. Also raises the error of a failed load.
    """
    try:
        return find_model(gateway, name, task)
    except (ModelNotFound, ModelNotReady):
        plain = to_served_name(name)
        plain = LIBRARY.get(plain, plain)
        if not await _is_on_disk(gateway, plain):
            raise
    try:
        request.require_access("admin")
    except (Unauthorized, Forbidden) as refusal:
        raise _not_found_error(name, f"it is on disk but not loaded. {refusal.message}") from None
    job = model_jobs.get_lifecycle(gateway).load(plain)
    await model_jobs.await_job(request, job, wait=True)
    return find_model(gateway, name, task)


async def _is_on_disk(gateway: Gateway, name: str) -> bool:
    if gateway.lifecycle is None:
        return False
    return any(each.name == name and each.status == "unloaded" for each in await list_models(gateway))


def _not_found_error(name: str, why: str) -> ModelNotFound:
    return ModelNotFound(f"model '{name[:_MAX_SHOWN]}' not found: {why or 'see GET /api/tags'}")


class ModelCatalog:
    """The read-only routes: lists, details of one model, and the version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode = decoder.Decoder(wire.OllamaNamed, "ollama")

    async def get_version(self, request: Request) -> Reply:
        client = _CLIENT.match(request.headers.get(b"user-agent", b""))
        return model_jobs.json_reply(
            wire.OllamaVersion(version=client[1].decode() if client else API_VERSION, shoal=__version__)
        )

    async def list_tags(self, request: Request) -> Reply:
        every = await list_models(self._gateway)
        served = {each.source for each in every if each.status != "unloaded"}
        found = [
            _to_entry(each, name)
            for each in every
            # Files on disk are not listed again if they are served under another name.
            if each.status in _USABLE
            and (each.status != "unloaded" or (each.source not in served and _can_load(request)))
            for name in _list_names(each)
        ]
        return model_jobs.json_reply(wire.OllamaTags(models=found))

    async def list_running(self, request: Request) -> Reply:
        found = [
            _to_running(each, self._expires_at(each.name))
            for each in await list_models(self._gateway)
            if each.status == "loaded"
        ]
        return model_jobs.json_reply(wire.OllamaPs(models=found))

    def _expires_at(self, name: str) -> str:
        lifecycle = self._gateway.lifecycle
        left = (
            lifecycle.seconds_until_sleep(name) if lifecycle is not None and self._gateway.registry.get(name) else None
        )
        return FOREVER if left is None else format_timestamp(time.time_ns() + round(left * 1e9))

    async def show(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        name = _require_name(payload.model, payload.name)
        return model_jobs.json_reply(_describe_model(await self._find_listing(name)))

    async def _find_listing(self, name: str) -> Listing:
        """Find a served model, or one on disk. Raises ModelNotFound and ModelNotReady."""
        missing: ShoalError
        try:
            plain, _ = find_model(self._gateway, name, "generate")
        except (ModelNotFound, ModelNotReady) as error:
            plain, missing = to_served_name(name), error
            plain = LIBRARY.get(plain, plain)
        else:
            missing = _not_found_error(name, "")
        found = next((each for each in await list_models(self._gateway) if each.name == plain), None)
        if found is None or found.status not in _USABLE:
            raise missing
        return found


class ModelTransfers:
    """The routes that pull and delete models. `schemes` are those of models' addresses."""

    def __init__(self, gateway: Gateway, schemes: Container[str]) -> None:
        self._gateway = gateway
        self._schemes = schemes
        self._decode_pull = decoder.Decoder(wire.OllamaPullRequest, "ollama")
        self._decode_name = decoder.Decoder(wire.OllamaNamed, "ollama")

    async def pull(self, request: Request) -> Reply:
        """Download a model and load it: the client uses it next, maybe without the right to load it."""
        payload = await self._decode_pull.decode_async(request.body)
        job = model_jobs.get_lifecycle(self._gateway).load(self._source(_require_name(payload.model, payload.name)))
        if payload.stream is False:
            try:
                await model_jobs.await_job(request, job, wait=True)
            except NotAtSource as error:
                raise _absent_error(error) from None
            return model_jobs.json_reply(wire.OllamaProgress(status="success"))
        request.is_handed_over, request.model = True, job.model
        return Reply(200, [NDJSON], stream_progress(job))

    def _source(self, reference: str) -> str:
        """Return what to load for a name, with the quantization in it. Raises InvalidValue."""
        plain = strip_tag(reference)
        base, form = split_quantization(plain)
        # Only names of Ollama's library mean a served model of that family: a repository is pulled.
        is_matched = self._gateway.registry.get(plain) is None and (form or "/" not in plain)
        if is_matched and (meant := _match_model(self._gateway, plain)):
            return meant
        name = LIBRARY.get(plain, f"{base}:{form}" if form else plain)
        if is_library_name(name, self._schemes):
            raise InvalidValue(
                f"'{reference[:_MAX_SHOWN]}' is a name in Ollama's library, which this server does not pull from: "
                "name a repository on the Hugging Face hub, such as hf.co/org/name",
                param="model",
            )
        return model_jobs.check_source(name)

    async def delete(self, request: Request) -> Reply:
        payload = await self._decode_name.decode_async(request.body)
        name = _require_name(payload.model, payload.name)
        job = model_jobs.get_lifecycle(self._gateway).delete(model_jobs.check_model_name(to_served_name(name)))
        await model_jobs.await_job(request, job, wait=True)
        if not job.changed:
            raise _not_found_error(name, "")
        return Reply(200)


async def stream_progress(job: Job) -> AsyncGenerator[bytes]:
    """Yield the progress of a load, line by line, from Ollama's first to its last.

    A disconnect ends the stream, not the load.
    """
    yield _encode_line(wire.OllamaProgress(status="pulling manifest"))
    previous: wire.OllamaProgress | None = None
    over = asyncio.create_task(job.done_event.wait())
    try:
        while not over.done():
            now = _to_progress(job)
            if now != previous and now.status:
                if full := _complete_bar(previous, now):
                    yield _encode_line(full)
                previous = now
                yield _encode_line(now)
            await asyncio.wait({over}, timeout=_POLL_INTERVAL_S)
    finally:
        over.cancel()
    try:
        if job.error is not None:
            raise _absent_error(job.error) if isinstance(job.error, NotAtSource) else job.error
    except ShoalError as error:
        yield _encode_line(wire.OllamaError(error=redact(error.message)))
        return
    if full := _complete_bar(previous, None):
        yield _encode_line(full)
    for status in _LAST_STEPS if job.changed else _LAST_STEPS[-1:]:
        yield _encode_line(wire.OllamaProgress(status=status))


def _complete_bar(last: wire.OllamaProgress | None, now: wire.OllamaProgress | None) -> wire.OllamaProgress | None:
    """Return a last, full line for a progress bar that ended unnoticed, once another bar begins or all is done."""
    if (
        last is None
        or not last.total
        or last.completed == last.total
        or (now is not None and now.digest == last.digest)
    ):
        return None
    return msgspec.structs.replace(last, completed=last.total)


def _absent_error(error: NotAtSource) -> NotAtSource:
    """Return the error for a model that the hub does not have, beginning as Ollama's own does."""
    return error.with_message(f"pull model manifest: file does not exist: {error.message}")


def _to_progress(job: Job) -> wire.OllamaProgress:
    progress = wire.OllamaProgress(status=job.stage)
    if job.total:
        # Clients draw one progress bar per digest, and label it with the first digits.
        digest = _hash(job.model, job.stage)
        progress.status, progress.digest = f"pulling {digest[:12]}", f"sha256:{digest}"
        progress.total, progress.completed = int(job.total), int(job.done or 0)
    return progress


def _encode_line(value: wire.OllamaProgress | wire.OllamaError) -> bytes:
    return ENCODE(value) + b"\n"


def _require_name(model: str | None, name: str | None) -> str:
    found = model or name
    if not found:
        raise InvalidValue("model is required", param="model")
    return found


def _can_load(request: Request) -> bool:
    try:
        request.require_access("admin")
    except ShoalError:
        return False
    return True


# Model descriptions


def _list_names(each: Listing) -> list[str]:
    adapters = each.facts.adapters if each.facts is not None else ()
    return [show_name(each.name, each.source), *(add_tag(each.name, adapter) for adapter in adapters)]


def _to_entry(each: Listing, name: str) -> wire.OllamaEntry:
    return wire.OllamaEntry(
        name=name,
        model=name,
        modified_at=format_timestamp(each.created * 1_000_000_000),
        size=each.size,
        digest=_digest(each, name.rpartition(":")[2]),
        details=_details(each.facts),
        capabilities=_capabilities(each.facts),
    )


def _to_running(each: Listing, expires_at: str) -> wire.OllamaRunning:
    name = show_name(each.name, each.source)
    return wire.OllamaRunning(
        name=name,
        model=name,
        size=each.size,
        digest=_digest(each, name.rpartition(":")[2]),
        details=_details(each.facts),
        expires_at=expires_at,
        size_vram=0,
        context_length=_context(each.facts),
    )


def _describe_model(each: Listing) -> wire.OllamaShown:
    facts = each.facts
    family = _text_detail(facts, "architecture") or "unknown"
    info: dict[str, Any] = {"general.architecture": family, "general.basename": each.name}
    if context := _context(facts):
        info[f"{family}.context_length"] = context
    if facts is not None and facts.dimension:
        info[f"{family}.embedding_length"] = facts.dimension
    if parameters := _parameters(facts):
        info["general.parameter_count"] = parameters
    return wire.OllamaShown(
        modelfile=f"FROM {redact(each.source)}\n" if each.source else "",
        parameters="",
        template=_text_detail(facts, "chat_template"),
        license="",
        details=_details(facts),
        model_info=info,
        capabilities=_capabilities(facts),
        modified_at=format_timestamp(each.created * 1_000_000_000),
    )


def _details(facts: ModelFacts | None) -> wire.OllamaDetails:
    family = _text_detail(facts, "architecture")
    return wire.OllamaDetails(
        format=facts.backend if facts is not None else "",
        family=family,
        families=[family] if family else [],
        parameter_size=_format_billions(_parameters(facts)),
        quantization_level=facts.precision.upper() if facts is not None else "",
    )


def _capabilities(facts: ModelFacts | None) -> list[str]:
    """List a model's capabilities. Generating models omit "embedding": Ollama's client embeds with all that have it."""
    tasks: Collection[str] = facts.tasks if facts is not None else ()
    found = ["completion"] if "generate" in tasks else ["embedding"] if "embed" in tasks else []
    details = facts.details if facts is not None else {}
    return found + [word for word in ("tools", "thinking", "vision") if details.get(word)]


def _context(facts: ModelFacts | None) -> int:
    return (facts.context_tokens or facts.max_input_tokens or 0) if facts is not None else 0


def _text_detail(facts: ModelFacts | None, name: str) -> str:
    found = facts.details.get(name) if facts is not None else None
    return found if isinstance(found, str) else ""


def _number_detail(facts: ModelFacts | None, name: str) -> int:
    found = facts.details.get(name) if facts is not None else None
    return found if isinstance(found, int) else 0


def _parameters(facts: ModelFacts | None) -> int:
    return _number_detail(facts, "parameter_count") or _number_detail(facts, "parameters")


def _format_billions(parameters: int) -> str:
    """Format a parameter count as "7.6B" or "22.7M"."""
    if not parameters:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _digest(each: Listing, tag: str = "latest") -> str:
    """Return a digest of the model's files, or of its source if they are not here.

    Clients require a digest, and show its beginning. It does not depend on the model's name or state.
    """
    digest = each.digest or _hash(each.source)
    return digest if tag == "latest" else _hash(digest, tag)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
