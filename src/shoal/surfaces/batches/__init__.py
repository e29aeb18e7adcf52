"""OpenAI's files and batches: requests in a file, which run in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from shoal.batches import BatchDesk, Identity
from shoal.batches.lines import ENDPOINTS
from shoal.batches.objects import paginate
from shoal.core.protocols import Operation
from shoal.errors import BodyTooLarge, InvalidValue, RequestTimeout, ShoalError, Unsupported
from shoal.http.errors import OpenAIError, render_error
from shoal.http.json.decoder import Decoder
from shoal.http.multipart import read_form
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.batches import wire
from shoal.surfaces.shared.model_jobs import json_reply
from shoal.surfaces.shared.owners import Owners
from shoal.surfaces.shared.paging import read_choice, read_limit

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

MAX_UPLOAD_S = 3600.0
MAX_PARTS = 16
FORM_BYTES = 65_536 + 16_384
"""What a form may hold beside its file."""
MAX_NAME = 255
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
_BINARY = (b"content-type", b"application/octet-stream")
_READ: dict[int, Any] = dict.fromkeys((400, 404, 503), OpenAIError)
_PAGE = {"after": "Id of the last object of the page before.", "limit": "Maximum objects of the page."}


class Batches:
    """`desk`: the files and batches of this process. Without one, every request is refused."""

    name = "batches"
    error = OpenAIError

    def __init__(self, options: Options, desk: BatchDesk | None = None) -> None:
        self._options = options
        self._desk = desk

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        endpoints = _Endpoints(self._options, self._desk)
        return [*_file_operations(endpoints, self._options), *_batch_operations(endpoints)]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


def _file_operations(endpoints: _Endpoints, options: Options) -> list[Operation]:
    return [
        DocumentedOperation(
            method="POST",
            path="/v1/files",
            endpoint=endpoints.upload,
            summary="Upload a file of requests",
            response=wire.FileObject,
            form=wire.FileForm,
            errors={**_READ, 409: OpenAIError, 413: OpenAIError, 429: OpenAIError},
            description="The body is multipart/form-data with `purpose` (`batch`) and `file`; it is written to disk as "
            "it comes. `expires_after[anchor]` and `expires_after[seconds]` shorten the 30 days that it is kept.",
            limit=(options.batch_file_mb << 20) + FORM_BYTES,
            single=True,
            reads_body=True,
        ),
        DocumentedOperation(
            method="GET",
            path="/v1/files",
            endpoint=endpoints.list_files,
            summary="List your files",
            response=wire.FileList,
            errors=_READ,
            query={**_PAGE, "order": "By time: `desc` (default) or `asc`.", "purpose": "Only files with this purpose."},
        ),
        Operation(
            method="GET",
            path="/v1/files/{id:path}",
            endpoint=endpoints.show_file,
            summary="Show a file",
            response=wire.FileObject,
            errors=_READ,
        ),
        Operation(
            method="GET",
            path="/v1/files/{id:path}/content",
            endpoint=endpoints.read_file,
            summary="Download a file",
            response=bytes,
            media_type="application/octet-stream",
            errors=_READ,
        ),
        Operation(
            method="DELETE",
            path="/v1/files/{id:path}",
            endpoint=endpoints.delete_file,
            summary="Delete a file",
            response=wire.DeletedFile,
            errors={**_READ, 409: OpenAIError},
            single=True,
        ),
    ]


def _batch_operations(endpoints: _Endpoints) -> list[Operation]:
    return [
        Operation(
            method="POST",
            path="/v1/batches",
            endpoint=endpoints.create,
            summary="Run the requests of a file in the background",
            request=wire.BatchRequest,
            response=wire.BatchObject,
            errors={**_READ, 429: OpenAIError},
            single=True,
        ),
        DocumentedOperation(
            method="GET",
            path="/v1/batches",
            endpoint=endpoints.list_batches,
            summary="List your batches",
            response=wire.BatchList,
            errors=_READ,
            query=_PAGE,
        ),
        Operation(
            method="GET",
            path="/v1/batches/{id:path}",
            endpoint=endpoints.show,
            summary="Show a batch",
            response=wire.BatchObject,
            errors=_READ,
        ),
        Operation(
            method="POST",
            path="/v1/batches/{id:path}/cancel",
            endpoint=endpoints.cancel,
            summary="Cancel a batch",
            response=wire.BatchObject,
            errors={**_READ, 409: OpenAIError},
            single=True,
        ),
    ]


class _Endpoints:
    def __init__(self, options: Options, desk: BatchDesk | None) -> None:
        self._found = desk
        self._owners = Owners(options)
        self._has_admins = bool(options.admin_key)
        self._max_bytes = options.batch_file_mb << 20
        self._decode = Decoder(wire.BatchRequest, "batches")

    @property
    def _desk(self) -> BatchDesk:
        if self._found is None:
            raise Unsupported("This server runs no batches: start it with `shoal serve`.")
        return self._found

    def _identify(self, request: Request) -> Identity:
        return Identity(request.client, self._owners.find(request), self._has_admins and request.has_access("admin"))

    async def upload(self, request: Request) -> Reply:
        desk, who = self._desk, self._identify(request)
        assert request.pieces is not None
        async with _limit_time(), desk.receive() as new:

            async def write(data: bytes) -> None:
                if new.size + len(data) > self._max_bytes:
                    raise BodyTooLarge(
                        f"The file has more than {self._max_bytes >> 20} MB; split it, or raise batch_file_mb.",
                        param="file",
                    )
                await desk.write(new, data)

            content_type = request.headers.get(b"content-type", b"")
            fields, name = await read_form(content_type, request.pieces, write, file_field="file", max_parts=MAX_PARTS)
            if fields.get("purpose") != "batch":
                raise InvalidValue("'purpose' must be 'batch': this server stores no other files.", param="purpose")
            if name is None:
                raise InvalidValue("The form has no 'file'; send one, with a filename.", param="file")
            if not new.size:
                raise InvalidValue("The file is empty; send one request per line.", param="file")
            stored = await desk.keep(new, who, _clean_name(name), _read_expiry(fields))
        return json_reply(wire.to_file(stored))

    async def list_files(self, request: Request) -> Reply:
        files = await self._desk.list_files(self._identify(request))
        if read_choice(request, "order", ("desc", "asc")) == "desc":
            files.reverse()
        if purpose := request.query_parameter("purpose"):
            files = [each for each in files if each.purpose == purpose]
        page, has_more = paginate(files, request.query_parameter("after"), read_limit(request, 10_000, 10_000))
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        data = [wire.to_file(each) for each in page]
        return json_reply(wire.FileList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def show_file(self, request: Request) -> Reply:
        return json_reply(wire.to_file(await self._desk.get_file(self._identify(request), request.parameter)))

    async def read_file(self, request: Request) -> Reply:
        content = await self._desk.open_content(self._identify(request), request.parameter)
        return Reply(200, [_BINARY], content)

    async def delete_file(self, request: Request) -> Reply:
        await self._desk.delete_file(self._identify(request), request.parameter)
        return json_reply(wire.DeletedFile(id=request.parameter))

    async def create(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        if payload.endpoint not in ENDPOINTS:
            raise InvalidValue(f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        _check_metadata(payload.metadata or {})
        expiry = payload.output_expires_after
        batch = await self._desk.create_batch(
            self._identify(request),
            file_id=payload.input_file_id,
            endpoint=payload.endpoint,
            metadata=payload.metadata,
            output_seconds=expiry.seconds if expiry is not None else None,
        )
        return json_reply(wire.to_batch(batch))

    async def list_batches(self, request: Request) -> Reply:
        found = await self._desk.list_batches(self._identify(request))
        page, has_more = paginate(found, request.query_parameter("after"), read_limit(request, 20, 100))
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        data = [wire.to_batch(each) for each in page]
        return json_reply(wire.BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def show(self, request: Request) -> Reply:
        return json_reply(wire.to_batch(await self._desk.get_batch(self._identify(request), request.parameter)))

    async def cancel(self, request: Request) -> Reply:
        return json_reply(wire.to_batch(await self._desk.cancel_batch(self._identify(request), request.parameter)))


@asynccontextmanager
async def _limit_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(MAX_UPLOAD_S):
            yield
    except TimeoutError:
        raise RequestTimeout(f"The file did not arrive within {MAX_UPLOAD_S:g} s; send it faster.") from None


def _read_expiry(fields: dict[str, str]) -> int | None:
    """Return the seconds after which a file expires, as the fields of a form say."""
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    valid = text.isascii() and text.isdigit() and len(text) < 9
    if not valid or not wire.MIN_EXPIRY_S <= int(text) <= wire.MAX_EXPIRY_S:
        raise InvalidValue(
            f"'expires_after[seconds]' must be a number from {wire.MIN_EXPIRY_S} to {wire.MAX_EXPIRY_S}.",
            param="expires_after",
        )
    return int(text)


def _clean_name(name: str) -> str:
    """Return the name of an uploaded file without folders and control characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(each for each in last if each.isprintable())[:MAX_NAME] or "upload"


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in metadata.items()
    ):
        raise InvalidValue(
            f"'metadata' may have {MAX_METADATA} keys of {MAX_KEY} characters, with values of {MAX_VALUE}.",
            param="metadata",
        )
