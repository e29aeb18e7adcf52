"""How models come and go on the `infer` surface, and the lists of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.surfaces import _infer_models, _jobs
from shoal.surfaces import _wire_infer as wire
from shoal.surfaces._infer_bodies import Body
from shoal.surfaces._listing import listing, mute
from shoal.surfaces._request import Reply, Request
from shoal.surfaces._wire_models import JobList

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
        name = _jobs.checked_source(asked.model_name, "model_name")
        return await self._load(request, asked, name, f"Model {name}")

    async def load_clip(self, request: Request) -> Reply:
        asked = await self._decode_clip(request.body)
        return await self._load(request, asked, _infer_models.source(asked), _infer_models.titled(asked))

    async def load_any(self, request: Request) -> Reply:
        asked = await self._decode_any(request.body)
        title = _infer_models.titled(asked) if asked.pretrained else f"Model {asked.model_name}"
        return await self._load(request, asked, _infer_models.source(asked), title)

    async def _load(
        self,
        request: Request,
        asked: wire.LoadRequest | wire.LoadClipRequest | wire.LoadAnyRequest,
        name: str,
        title: str,
    ) -> Reply:
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).load(name, _jobs.load_options(asked.backend, asked.text_in))
        reply = await _jobs.settle(request, job, wait=wait)
        return reply or _said(f"{title} {'loaded successfully' if job.changed else 'is already loaded'}.")

    async def unload(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = await _infer_models.known(self._gateway, asked)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).unload(name)
        reply = await _jobs.settle(request, job, wait=wait)
        what = "unloaded successfully" if job.changed else "is not loaded"
        return reply or _said(f"{_infer_models.titled(asked)} {what}.")

    async def delete(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = await _infer_models.known(self._gateway, asked)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).delete(name)
        reply = await _jobs.settle(request, job, wait=wait)
        return reply or _said(f"{_infer_models.titled(asked)} deleted successfully.")

    async def loaded(self, request: Request) -> Reply:
        silent = mute(self._gateway)
        names = [card.name for card in self._gateway.models() if card.state == "ready" and card.name not in silent]
        return _jobs.encoded(wire.LoadedModels(models=names))

    async def repository(self, request: Request) -> Reply:
        models = [
            wire.RepositoryModel(
                name=each.name,
                state=_STATES.get(each.status, "UNAVAILABLE"),
                reason=each.error or each.note,
                managed=each.managed,
            )
            for each in await listing(self._gateway)
        ]
        return _jobs.encoded(wire.RepositoryModels(models=models))

    async def jobs(self, request: Request) -> Reply:
        jobs = _jobs.lifecycle_of(self._gateway).jobs()
        return _jobs.encoded(JobList(jobs=[_jobs.status_of(job) for job in jobs]))

    async def job(self, request: Request) -> Reply:
        return _jobs.encoded(_jobs.status_of(_jobs.lifecycle_of(self._gateway).job(request.parameter)))


def _said(message: str) -> Reply:
    return _jobs.encoded(wire.Message(message=message))
