"""Shared code of the routes that load, unload, download and delete models: check names, await and report jobs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.lifecycle.lifecycle import Job, Lifecycle, LoadOptions
from shoal.errors import InvalidValue, ModelNotFound, Unsupported
from shoal.http.redaction import redact
from shoal.http.request import JSON, Reply, Request
from shoal.names import NAME, NAME_RULE, QUANTIZATION, RESERVED, is_name
from shoal.surfaces.shared import wire_models as wire
from shoal.surfaces.shared.listing import list_models

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

WAIT = {"wait": "false: return 202 with a job at once instead of waiting until it is done."}

# The loader checks the rest: the @revision after a name, and addresses. Nothing else may begin like a path.
_SOURCE = re.compile(
    rf"{NAME}(?::(?i:{QUANTIZATION.pattern}))?(?:@[A-Za-z0-9._/-]{{1,96}})?|[a-z][a-z0-9+]*:[\x21-\x5b\x5d-\x7e]{{0,512}}"
)
_STEPS = re.compile(r"(?:^|[/:@#])\.{1,2}(?:$|[/@#])")
_MAX_SHOWN = 200
_ENCODE = msgspec.json.Encoder()


def get_lifecycle(gateway: Gateway) -> Lifecycle:
    """Return the gateway's lifecycle. Raises Unsupported if the server has a fixed set of models."""
    found = gateway.lifecycle
    if found is None:
        raise Unsupported("This server serves a fixed set of models: start it with `shoal serve` to load others.")
    return found


def check_model_name(name: str, param: str = "model") -> str:
    """Return `name` if it is a valid model name, else raise InvalidValue. This is the first check of the name."""
    if not is_name(name) or name in RESERVED:
        raise InvalidValue(
            f"{name[:_MAX_SHOWN]!r} cannot name a model; {NAME_RULE}, but not {', '.join(sorted(RESERVED))}.",
            param=param,
        )
    return name


def check_source(text: str, param: str = "model") -> str:
    """Return `text` if it is a valid model name or source address, else raise InvalidValue."""
    if _SOURCE.fullmatch(text) is None or _STEPS.search(text) or text in RESERVED:
        raise InvalidValue(
            f"{text[:_MAX_SHOWN]!r} is not a model's name or address; write org/name, org/name@revision or "
            "pypi:package.",
            param=param,
        )
    return text


def load_options(backend: str | None, text_in: bool | None) -> LoadOptions:
    return LoadOptions(backend=backend or "", text_in=text_in)


def should_wait(request: Request) -> bool:
    """Whether to reply only when the job is done (`wait`). Raises InvalidValue."""
    match request.query_parameter("wait"):
        case None | "" | "true" | "1":
            return True
        case "false" | "0":
            return False
        case other:
            raise InvalidValue(f"wait={other[:_MAX_SHOWN]!r} is neither true nor false.", param="wait")


async def await_job(request: Request, job: Job, *, wait: bool) -> Reply | None:
    """Wait for the job and return None, or return a 202 with its location if `wait` is false.

    Raises the job's error. A disconnect ends the wait, not the job. From here on the request no longer counts as
    refused.
    """
    request.is_handed_over = True
    request.model = job.model
    if not wait:
        return Reply(202, [JSON, (b"location", f"/jobs/{job.id}".encode())], _ENCODE.encode(to_status(job)))
    await job.wait()
    return None


async def start_unload(gateway: Gateway, name: str) -> Job:
    """Start the job that unloads a model. Raises ModelNotFound if no model has that name, loaded or not."""
    job = get_lifecycle(gateway).unload(name)
    known = job.changed or gateway.registry.was_unloaded(job.model)
    if not known and job.model not in {each.name for each in await list_models(gateway)}:
        raise unknown_model_error(name)
    return job


def check_changed(job: Job) -> None:
    """Raise ModelNotFound if there was nothing to delete."""
    if not job.changed:
        raise unknown_model_error(job.model)


def unknown_model_error(name: str) -> ModelNotFound:
    return ModelNotFound(f"the model {name!r} does not exist: see GET /models", param="model")


def to_status(job: Job) -> wire.JobStatus:
    return wire.JobStatus(
        job=job.id,
        action=job.action,
        model=job.model,
        state=job.state,
        created=int(job.created),
        stage=job.stage,
        progress=job.fraction,
        done=job.done,
        total=job.total,
        finished=None if job.finished is None else int(job.finished),
        changed=job.changed if job.state == "done" else None,
        error=None if job.error is None else redact(job.error.message),
    )


def json_reply(value: Any) -> Reply:
    return Reply(200, [JSON], _ENCODE.encode(value))
