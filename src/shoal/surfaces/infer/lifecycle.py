"""How models come and go on the `infer` surface, and the lists of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.http.redaction import redacted
from shoal.http.request import Reply, Request
from shoal.surfaces.infer import models, wire
from shoal.surfaces.infer.bodies import Body
from shoal.surfaces.shared import model_jobs
from shoal.surfaces.shared.listing import listing, mute
from shoal.surfaces.shared.wire_models import JobList

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_STATES: dict[str, Literal["READY", "LOADING", "UNLOADING"]] = {
    "loaded": "READY",
    "loading": "LOADING",
    "unloading": "UNLOADING",
}


class Life:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_load = Body(wire.LoadRequest)
        self._decode_clip = Body(wire.LoadClipRequest)
        self._decode_any = Body(wire.LoadAnyRequest)
        self._decode_name = Body(wire.NamedRequest)

    async def load(self, request: Request) -> Reply:
        asked = await self._decode_load(request.body)
        name = model_jobs.checked_source(asked.model_name, "model_name")
        return await self._load(request, asked, name, f"Model {name}")

    async def load_clip(self, request: Request) -> Reply:
        asked = await self._decode_clip(request.body)
        return await self._load(request, asked, models.source(asked), models.titled(asked))

    async def load_any(self, request: Request) -> Reply:
        asked = await self._decode_any(request.body)
        title = models.titled(asked) if asked.pretrained else f"Model {asked.model_name}"
        return await self._load(request, asked, models.source(asked), title)

    async def _load(
        self,
        request: Request,
        asked: wire.LoadRequest | wire.LoadClipRequest | wire.LoadAnyRequest,
        name: str,
        title: str,
    ) -> Reply:
        wait = model_jobs.waits(request)
        job = model_jobs.lifecycle_of(self._gateway).load(name, model_jobs.load_options(asked.backend, asked.text_in))
        reply = await model_jobs.settle(request, job, wait=wait)
        return reply or _said(f"{title} {'loaded successfully' if job.changed else 'is already loaded'}.")

    async def unload(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = await models.known(self._gateway, asked)
        wait = model_jobs.waits(request)
        job = model_jobs.lifecycle_of(self._gateway).unload(name)
        reply = await model_jobs.settle(request, job, wait=wait)
        what = "unloaded successfully" if job.changed else "is not loaded"
        return reply or _said(f"{models.titled(asked)} {what}.")

    async def delete(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = await models.known(self._gateway, asked)
        wait = model_jobs.waits(request)
        job = model_jobs.lifecycle_of(self._gateway).delete(name)
        reply = await model_jobs.settle(request, job, wait=wait)
        return reply or _said(f"{models.titled(asked)} deleted successfully.")

    async def loaded(self, request: Request) -> Reply:
        silent = mute(self._gateway)
        names = [card.name for card in self._gateway.models() if card.state == "ready" and card.name not in silent]
        return model_jobs.encoded(wire.LoadedModels(models=names))

    async def repository(self, request: Request) -> Reply:
        models = [
            wire.RepositoryModel(
                name=each.name,
                state=_STATES.get(each.status, "UNAVAILABLE"),
                reason=redacted(each.error or each.note),
                managed=each.managed,
            )
            for each in await listing(self._gateway)
        ]
        return model_jobs.encoded(wire.RepositoryModels(models=models))

    async def jobs(self, request: Request) -> Reply:
        jobs = model_jobs.lifecycle_of(self._gateway).jobs()
        return model_jobs.encoded(JobList(jobs=[model_jobs.status_of(job) for job in jobs]))

    async def job(self, request: Request) -> Reply:
        return model_jobs.encoded(model_jobs.status_of(model_jobs.lifecycle_of(self._gateway).job(request.parameter)))


def _said(message: str) -> Reply:
    return model_jobs.encoded(wire.Message(message=message))
