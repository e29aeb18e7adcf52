"""Every error that Shoal raises on purpose, by who is at fault and when.

ShoalError
├── RequestError              the caller's fault: another try with the same bytes fails again
│   ├── Malformed             the body is not JSON, or not readable at all
│   ├── WrongType             JSON, but a field is missing or has the wrong type or bounds
│   ├── EmptyInput            nothing to work on: no input, or an empty one
│   ├── TooManyInputs         more inputs than one request may hold
│   ├── TooLong               an input does not fit the model and may not be cut
│   ├── InvalidValue          well-formed, but this model cannot do it (dimensions, prompt name, token id)
│   ├── Unsupported           a known field or task that this model does not support
│   ├── BodyTooLarge          the body is over the byte limit
│   ├── UnsupportedMediaType  not a content type that the route reads
│   ├── Unauthorized          no key, or one that is not known
│   ├── Forbidden             a valid caller without the right
│   ├── RouteNotFound         no such path
│   ├── MethodNotAllowed      the path exists, the method does not
│   ├── ModelNotFound         no model of that name is served
│   ├── JobNotFound           no job of that id is known, or it was too long ago
│   ├── ObjectNotFound        no file or batch of that id, or it belongs to another client
│   └── Conflict              it cannot be done beside what is there: the name means another model, or somebody undid it
├── CapacityError             not the caller's fault: the same request can succeed later
│   ├── Overloaded            the queue, or this client's share of it, is full
│   ├── ModelNotReady         the model is loading or going away, or of a server, perhaps, that is not there yet
│   ├── ModelFailed           the model could not be loaded: later means once the operator has acted
│   ├── Unavailable           no replica can take work, or the server is draining
│   ├── DeadlineExceeded      the request's one deadline passed
│   └── RequestTimeout        the client sent its body too slowly
├── Cancelled                 the client left; nobody reads the answer
├── BackendError              the model or what runs it
│   ├── InputRejected         the engine refused these inputs by name; retrying them cannot help
│   ├── EngineFailed          the engine failed and did not say why
│   │   └── UpstreamFailed    the server that runs the model failed, or its answer is none
│   ├── OutOfMemory           the batch did not fit
│   ├── UpstreamRefused       an OpenAI-compatible server refused, in words that are passed on as they are
│   ├── TransportFailed       the replica could not be reached, or the connection broke
│   │   └── Crashed           the process that ran the batch died, of this batch or beside it
│   └── NotFinite             the model answered NaN or infinity for this input
├── SetupError                the operator's side: the terminal shows the message, and it says the next step
│   ├── ConfigError           a setting is unknown or has a value that cannot work
│   ├── AddressError          a model's address or name breaks the grammar
│   ├── SourceError           a model's files could not be fetched
│   │   ├── SourceAway        the source cannot be reached, or is too busy: later it may be
│   │   └── NotAtSource       the source answered that it has nothing of that name, which is who named it at fault
│   ├── ModelFileError        a model's file is missing, broken or asks for what is not supported
│   ├── VerificationFailed    a converted model disagrees with its second path
│   └── MissingExtra          an optional part of Shoal is not installed
└── InternalError             a bug in Shoal

A surface turns `kind` into its dialect's status and body (`http/status_codes.py`); nothing else decides on statuses.
"""

from __future__ import annotations

from copy import copy
from typing import ClassVar, Self


class ShoalError(Exception):
    """The root: `message` is for people and contains the next step; `param` names the field at fault, if one is.

    `retry_after` is seconds until another try may succeed, when that is known. `request_id`: of the request that is
    answered with this error, for dialects that show it.
    """

    kind: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    request_id: str = ""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    def __copy__(self) -> Self:
        """Without its class's constructor, which may want more than a message; and without the frames and the cause,
        for whoever keeps an error: they hold whatever was in memory when it was raised, and grow each time it is."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made

    def at_input(self, index: int) -> Self:
        """The same error, saying which of a request's inputs it is about (counted from 0, as in the request)."""
        return self.with_message(f"input {index}: {self.message}")

    def for_request(self, request_id: str) -> Self:
        """The same error as the answer to one request: a copy, because several may have the same one."""
        error = copy(self)
        error.request_id = request_id
        return error

    def with_message(self, message: str) -> Self:
        """The same error in other words, for where it is told: a copy, so that who else has it keeps its own."""
        error = copy(self)
        error.message = message
        error.args = (message,)
        return error


class RequestError(ShoalError):
    kind = "invalid"


class Malformed(RequestError):
    kind = "malformed"


class WrongType(RequestError):
    kind = "wrong_type"


class EmptyInput(RequestError):
    kind = "empty"


class TooManyInputs(RequestError):
    kind = "too_many"


class TooLong(RequestError):
    kind = "too_long"


class InvalidValue(RequestError):
    kind = "invalid_value"


class Unsupported(RequestError):
    kind = "unsupported"


def make_body_error(kind: str, message: str, param: str | None) -> RequestError:
    """Return the error of this kind about a body; Unsupported for a kind that is about something else."""
    classes: tuple[type[RequestError], ...] = (EmptyInput, InvalidValue, Malformed, TooManyInputs, WrongType)
    return next((each for each in classes if each.kind == kind), Unsupported)(message, param=param)


class BodyTooLarge(RequestError):
    kind = "too_large"


class UnsupportedMediaType(RequestError):
    kind = "media_type"


class Unauthorized(RequestError):
    kind = "unauthorized"


class Forbidden(RequestError):
    kind = "forbidden"


class RouteNotFound(RequestError):
    kind = "route_not_found"


class MethodNotAllowed(RequestError):
    """`allow` is the value for the `Allow` header."""

    kind = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ModelNotFound(RequestError):
    kind = "model_not_found"


class JobNotFound(RequestError):
    kind = "job_not_found"


class ObjectNotFound(RequestError):
    kind = "object_not_found"


class Conflict(RequestError):
    kind = "conflict"


class CapacityError(ShoalError):
    kind = "unavailable"
    retryable = True


class Overloaded(CapacityError):
    kind = "overloaded"


class ModelNotReady(CapacityError):
    kind = "not_ready"


class ModelFailed(CapacityError):
    kind = "model_failed"
    retryable = False


class Unavailable(CapacityError):
    kind = "unavailable"


class DeadlineExceeded(CapacityError):
    kind = "deadline"


class RequestTimeout(CapacityError):
    kind = "request_timeout"


class Cancelled(ShoalError):
    kind = "cancelled"


class BackendError(ShoalError):
    kind = "backend"


class InputRejected(BackendError):
    kind = "input_rejected"


class EngineFailed(BackendError):
    kind = "backend"


class UpstreamFailed(EngineFailed):
    kind = "upstream_failed"


class OutOfMemory(BackendError):
    kind = "out_of_memory"


class UpstreamRefused(BackendError):
    """`status` and `body` (with its `content_type`) as the server sent them; the message says the same in short.
    `server` is its address, which clients must not see in either; empty if unknown. With a status of 500 or above the
    server failed: its kind is that of UpstreamFailed."""

    kind = "upstream"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        body: bytes = b"",
        content_type: str = "application/json",
        param: str | None = None,
        retry_after: float | None = None,
        server: str = "",
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.status = status
        if status >= 500 and status != 501:  # a route that the server does not have
            vars(self)["kind"] = UpstreamFailed.kind  # the class has the kind of refusals
        self.body = body
        self.content_type = content_type
        self.server = server


class TransportFailed(BackendError):
    kind = "transport"
    retryable = True


class Crashed(TransportFailed):
    kind = "crashed"
    retryable = False


class NotFinite(BackendError):
    kind = "not_finite"


class SetupError(ShoalError):
    kind = "setup"


class ConfigError(SetupError):
    kind = "config"


class AddressError(SetupError):
    kind = "address"


class SourceError(SetupError):
    kind = "source"


class SourceAway(SourceError):
    retryable = True


class NotAtSource(SourceError):
    kind = "not_at_source"


class ModelFileError(SetupError):
    """`file` and `key` say where: a path inside the model's folder and a key or tensor in it."""

    kind = "model_file"

    def __init__(self, message: str, *, file: str, key: str | None = None) -> None:
        where = f"{file}: {key}" if key else file
        super().__init__(f"{where}: {message}")
        self.file = file
        self.key = key


class VerificationFailed(SetupError):
    kind = "verification"


def install_command(extra: str) -> str:
    """Return the advice that adds an optional dependency."""
    return f"run in your clone: pip install -e '.[{extra}]'"


class MissingExtra(SetupError):
    """An optional dependency is absent; the message holds the pip command that adds it."""

    kind = "missing_extra"

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the '{extra}' extra; {install_command(extra)}")
        self.extra = extra


class InternalError(ShoalError):
    kind = "internal"
