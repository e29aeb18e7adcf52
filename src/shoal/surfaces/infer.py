"""The surface of the sentence-transformers inference server: models come and go over HTTP, and embed by name."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import msgspec
import orjson

from shoal.core.protocols import Operation
from shoal.errors import (
    EmptyInput,
    InvalidValue,
    Malformed,
    ModelNotFound,
    RequestError,
    ShoalError,
    TooManyInputs,
    Unsupported,
    WrongType,
)
from shoal.surfaces import _facts, _jobs, _rows, _status, _wire
from shoal.surfaces import _wire_infer as wire
from shoal.surfaces._listing import listing, mute
from shoal.surfaces._operation import Described
from shoal.surfaces._request import JSON, Options, Reply, Request
from shoal.surfaces._wire_models import JobList, JobStatus
from shoal.types import Embed, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

T = TypeVar("T", bound=msgspec.Struct)

_READ: dict[int, Any] = {500: wire.Detail}
_CHANGE: dict[int, Any] = {**dict.fromkeys((400, 403, 404, 409, 500, 502, 503, 504), wire.Detail), 422: wire.Problems}
_EMBED: dict[int, Any] = {**dict.fromkeys((400, 429, 500, 502, 503, 504), wire.Detail), 422: wire.Problems}
_STATES: dict[str, Literal["READY", "LOADING", "UNLOADING"]] = {
    "loaded": "READY",
    "loading": "LOADING",
    "unloading": "UNLOADING",
}
_NAME = {"model_name": "intfloat/e5-small-v2"}
_CAT = {**_NAME, "text": ["a cat", "a dog"]}
_KINDS = {"str": "string_type", "bool": "bool_type", "int": "int_type", "object": "model_attributes_type"}
_LONGEST_ECHO = 1000
_LONGEST_LOOK = 65_536


class Infer:
    name = "infer"
    error = wire.Detail

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [*_changes(_Life(gateway)), *_reads(_Life(gateway)), *_embeds(_Texts(gateway, self._options.max_inputs))]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        """The original's shapes: a text, or for a body that is not as it should be a list of what is wrong with it.

        Its framework says 422 to those; all other statuses are those of OpenAI's dialect, because the original has
        none of its own: it answers 500 to whatever it did not foresee.
        """
        if isinstance(error, Malformed | WrongType):
            detail: Any = [_problem(error)]
            status = 422
        else:
            detail = error.message
            status = _status.row(error).openai.status
        headers = {"content-type": "application/json", **_status.headers(error, status)}
        return status, headers, orjson.dumps({"detail": detail})


def _changes(life: _Life) -> list[Operation]:
    routes: list[tuple[str, Any, Any, str, dict[str, Any]]] = [
        ("/load_sentence_transformer_model", life.load, wire.LoadRequest, "Load a model", _NAME),
        ("/unload_model", life.unload, wire.NamedRequest, "Unload a model", _NAME),
        ("/delete_model", life.delete, wire.NamedRequest, "Unload a model and delete its files", _NAME),
    ]
    return [
        Described(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            access="admin",
            request=request,
            response=wire.Message,
            errors=_CHANGE,
            example=example,
            query=_jobs.WAIT,
            accepted=JobStatus,
        )
        for path, endpoint, request, summary, example in routes
    ]


def _reads(life: _Life) -> list[Operation]:
    return [
        Operation(
            method="GET",
            path="/loaded_models",
            endpoint=life.loaded,
            summary="Name the models that are loaded",
            response=wire.LoadedModels,
            errors=_READ,
        ),
        Operation(
            method="GET",
            path="/repository_models",
            endpoint=life.repository,
            summary="Name all models, with their state in Triton's words",
            response=wire.RepositoryModels,
            errors=_READ,
        ),
        Operation(
            method="GET",
            path="/jobs",
            endpoint=life.jobs,
            quiet=True,
            summary="List the jobs that run, and the last that ended",
            access="admin",
            response=JobList,
            errors={400: wire.Detail, **_READ},
        ),
        Operation(
            method="GET",
            path="/jobs/{id:path}",
            endpoint=life.job,
            quiet=True,
            summary="Show one job",
            access="admin",
            response=JobStatus,
            errors={400: wire.Detail, 404: wire.Detail, **_READ},
        ),
    ]


def _embeds(texts: _Texts) -> list[Operation]:
    routes: list[tuple[str, Any, Any, Any, str]] = [
        ("/infer_text", texts.infer_text, wire.InferTextRequest, wire.TextEmbedding, "Embed texts"),
        ("/infer", texts.infer, wire.InferRequest, wire.Embeddings, "Embed texts; images are not served yet"),
    ]
    return [
        Operation(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            response=response,
            errors=_EMBED,
            headers=_facts.DOCUMENTED,
            example=_CAT,
        )
        for path, endpoint, request, response, summary in routes
    ]


class _Life:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_load = _Body(wire.LoadRequest)
        self._decode_name = _Body(wire.NamedRequest)

    async def load(self, request: Request) -> Reply:
        asked = await self._decode_load(request.body)
        name = _jobs.checked_source(asked.model_name, "model_name")
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).load(name, _jobs.load_options(asked.backend, asked.text_in))
        reply = await _jobs.settle(request, job, wait=wait)
        return reply or _said(f"Model {name} {'loaded successfully' if job.changed else 'is already loaded'}.")

    async def unload(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = _jobs.checked_name(asked.model_name, "model_name")
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).unload(name)
        reply = await _jobs.settle(request, job, wait=wait)
        what = "unloaded successfully" if job.changed else "is not loaded"
        return reply or _said(f"{_titled(name, asked.pretrained)} {what}.")

    async def delete(self, request: Request) -> Reply:
        asked = await self._decode_name(request.body)
        name = _jobs.checked_name(asked.model_name, "model_name")
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).delete(name)
        reply = await _jobs.settle(request, job, wait=wait)
        return reply or _said(f"{_titled(name, asked.pretrained)} deleted successfully.")

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


class _Texts:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._max_inputs = max_inputs
        self._decode_text = _Body(wire.InferTextRequest, "text", max_inputs)
        self._decode = _Body(wire.InferRequest, "text", max_inputs)

    async def infer_text(self, request: Request) -> Reply:
        asked = await self._decode_text(request.body)
        return await self._embed(request, asked, asked.text, b"embedding")

    async def infer(self, request: Request) -> Reply:
        asked = await self._decode(request.body)
        if asked.image is not None:
            raise Unsupported("Images are not served by this version; send `text` alone.", param="image")
        if asked.text is None:
            raise EmptyInput("There is nothing to embed; send `text`.", param="text")
        return await self._embed(request, asked, asked.text, b"text_embeddings")

    async def _embed(
        self, request: Request, asked: wire.InferTextRequest | wire.InferRequest, text: str | list[str], key: bytes
    ) -> Reply:
        texts = [text] if isinstance(text, str) else text
        if not texts:
            raise EmptyInput("`text` is an empty list; send at least one text.", param="text")
        if len(texts) > self._max_inputs:
            raise TooManyInputs(f"`text` holds more than the {self._max_inputs} texts that one request may; split it.")
        model = self._served(asked)
        request.model, request.items = model, len(texts)
        task = Embed(
            model=model,
            inputs=cast(list[TextItem], texts),
            normalize=asked.normalize,
            dimensions=asked.n_dims or asked.also_n_dims,
        )
        result = await self._gateway.run(task, request.context())
        request.result = result
        milliseconds = (time.monotonic() - request.started) * 1000
        tail = b'],"processingTimeMs":%b}' % orjson.dumps(round(milliseconds, 3))
        body = await _rows.joined(_rows.contiguous(result.vectors), _row, b'{"%b":[' % key, tail)
        return Reply(200, [JSON, *_facts.batch_headers(request, result)], body)

    def _served(self, asked: wire.InferTextRequest | wire.InferRequest) -> str:
        """The model's own name. Raises, in the original's words, InvalidValue when it is not there and Unsupported when
        it does not embed."""
        titled = _titled(asked.model_name, asked.pretrained)
        try:
            card = self._gateway.model(_jobs.checked_name(asked.model_name, "model_name"))
        except ModelNotFound:
            raise InvalidValue(
                f"{titled} is not loaded. Load the model first using /load_model.", param="model_name"
            ) from None
        if card.facts is not None and "embed" not in card.facts.tasks:
            raise Unsupported(f"{titled} does not support text inference.", param="model_name")
        return card.name


def _row(index: int, row: Any) -> bytes:
    return _rows.numbers(row)


def _said(message: str) -> Reply:
    return _jobs.encoded(wire.Message(message=message))


def _titled(name: str, checkpoint: str | None) -> str:
    """As the original writes it, also where there is no checkpoint."""
    return f"Model {name} with checkpoint {checkpoint}"


class _Unfit(WrongType):
    """A body that does not fit, with what was there instead: the original's framework tells it."""

    def __init__(self, error: RequestError, found: Any) -> None:
        super().__init__(error.message, param=error.param)
        self.error = error
        self.found = found


class _Body(Generic[T]):
    """Decodes one type of body. The name may stand under `name`, as the original's later versions call it."""

    def __init__(self, kind: type[T], many: str = "", limit: int = 0) -> None:
        self._decode = _wire.Decoder(kind, "infer", many, limit)

    async def __call__(self, body: bytes) -> T:
        """Raises _Unfit and Malformed."""
        try:
            return await self._decode.in_turns(body)
        except WrongType as error:
            if isinstance(error, _wire.FieldError) and error.missing and error.at == "model_name":
                await asyncio.sleep(0)
                name = _name_in(body)
                await asyncio.sleep(0)
                if name is not None:
                    return await self(b'{"model_name":%b,%b' % (orjson.dumps(name), body.lstrip()[1:]))
            # A second look at the body costs, and who sends much of it is no person who tries things out.
            found = _wire.plain(body) if len(body) <= _LONGEST_LOOK else None
            raise _Unfit(error, found) from None


class _Named(msgspec.Struct):
    name: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def _name_in(body: bytes) -> str | None:
    """What stands under `name` in an object that is known to be JSON."""
    try:
        return _NAMED.decode(body).name
    except msgspec.ValidationError:
        return None


def _problem(error: RequestError) -> dict[str, Any]:
    """One entry of the framework's list."""
    found: Any = None
    cause: RequestError = error
    if isinstance(error, _Unfit):
        found, cause = error.found, error.error
    if not isinstance(cause, _wire.FieldError):
        kind = "json_invalid" if isinstance(cause, Malformed) else "value_error"
        return {"type": kind, "loc": ["body"], "msg": cause.message, "input": None}
    steps = [step for step in re.split(r"[.\[\]]", cause.at) if step]
    location = ["body", *(int(step) if step.isdigit() else step for step in steps)]
    kind = "missing" if cause.missing else _kind_of(cause.reason)
    shown = _at(found, location[1:-1] if cause.missing else location[1:])
    return {"type": kind, "loc": location, "msg": cause.reason, "input": shown}


def _kind_of(reason: str) -> str:
    """The framework's word for what was wanted: of "Expected `str`, got `int`" it is string_type."""
    wanted = reason.partition("`")[2].partition("`")[0].partition(" |")[0]
    return _KINDS.get(wanted, "value_error")


def _at(found: Any, steps: Sequence[str | int]) -> Any:
    """What stands there in the body; None where that is long or cannot be written."""
    try:
        for step in steps:
            found = found[step]
        # Nested as deep as the answer nests it, since the encoder has a limit there.
        return found if len(orjson.dumps([[[[found]]]])) <= _LONGEST_ECHO else None
    except (LookupError, TypeError):
        return None
