"""The routes of the `infer` surface that load, unload, delete and list models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.http.redaction import redact
from shoal.http.request import Reply, Request
from shoal.surfaces.infer import models, wire
from shoal.surfaces.infer.bodies import BodyDecoder
from shoal.surfaces.shared import model_jobs
from shoal.surfaces.shared.listing import find_unresponsive, list_models
from shoal.surfaces.shared.wire_models import JobList

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_STATES: dict[str, Literal["READY", "LOADING", "UNLOADING"]] = {
    "loaded": "READY",
    "loading": "LOADING",
    "unloading": "UNLOADING",
}


class LifecycleEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_load = BodyDecoder(wire.LoadRequest)
        self._decode_clip = BodyDecoder(wire.LoadClipRequest)
        self._decode_any = BodyDecoder(wire.LoadAnyRequest)
        self._decode_name = BodyDecoder(wire.NamedRequest)

    async def load(self, request: Request) -> Reply:
        body = await self._decode_load(request.body)
        name = model_jobs.check_source(body.model_name, "model_name")
        return await self._load(request, body, name, f"Model {name}")

    async def load_clip(self, request: Request) -> Reply:
        body = await self._decode_clip(request.body)
        return await self._load(request, body, models.to_source(body), models.format_title(body))

    async def load_any(self, request: Request) -> Reply:
        body = await self._decode_any(request.body)
        title = models.format_title(body) if body.pretrained else f"Model {body.model_name}"
        return await self._load(request, body, models.to_source(body), title)

    async def _load(
        self,
        request: Request,
        body: wire.LoadRequest | wire.LoadClipRequest | wire.LoadAnyRequest,
        name: str,
        title: str,
    ) -> Reply:
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).load(name, model_jobs.load_options(body.backend, body.text_in))
        reply = await model_jobs.await_job(request, job, wait=wait)
        return reply or _message_reply(f"{title} {'loaded successfully' if job.changed else 'is already loaded'}.")

    async def unload(self, request: Request) -> Reply:
        body = await self._decode_name(request.body)
        name = await models.resolve_name(self._gateway, body)
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).unload(name)
        reply = await model_jobs.await_job(request, job, wait=wait)
        what = "unloaded successfully" if job.changed else "is not loaded"
        return reply or _message_reply(f"{models.format_title(body)} {what}.")

    async def delete(self, request: Request) -> Reply:
        body = await self._decode_name(request.body)
        name = await models.resolve_name(self._gateway, body)
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).delete(name)
        reply = await model_jobs.await_job(request, job, wait=wait)
        return reply or _message_reply(f"{models.format_title(body)} deleted successfully.")

    async def list_loaded(self, request: Request) -> Reply:
        silent = find_unresponsive(self._gateway)
        names = [card.name for card in self._gateway.models() if card.state == "ready" and card.name not in silent]
        return model_jobs.json_reply(wire.LoadedModels(models=names))

    async def list_repository(self, request: Request) -> Reply:
        models = [
            wire.RepositoryModel(
                name=each.name,
                state=_STATES.get(each.status, "UNAVAILABLE"),
                reason=redact(each.error or each.note),
                managed=each.managed,
            )
            for each in await list_models(self._gateway)
        ]
        return model_jobs.json_reply(wire.RepositoryModels(models=models))

    async def list_jobs(self, request: Request) -> Reply:
        jobs = model_jobs.get_lifecycle(self._gateway).jobs()
        return model_jobs.json_reply(JobList(jobs=[model_jobs.to_status(job) for job in jobs]))

    async def show_job(self, request: Request) -> Reply:
        return model_jobs.json_reply(
            model_jobs.to_status(model_jobs.get_lifecycle(self._gateway).job(request.parameter))
        )


def _message_reply(message: str) -> Reply:
    return model_jobs.json_reply(wire.Message(message=message))
