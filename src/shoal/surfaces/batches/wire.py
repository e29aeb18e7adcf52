"""The objects of OpenAI's files and batches."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.batches import desk, lines, objects

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, desk.FILE_S


class ExpiresAfter(msgspec.Struct, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: Annotated[str, Meta(description="A file with the purpose `batch`.")]
    endpoint: Annotated[str, Meta(description=f"One of {', '.join(lines.ENDPOINTS)}.")]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class FileForm(msgspec.Struct, kw_only=True):
    file: Annotated[bytes, Meta(description="Lines of JSON.", extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[objects.LineError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: objects.Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def to_file(stored: objects.StoredFile) -> FileObject:
    return FileObject(
        id=stored.id,
        bytes=stored.bytes,
        created_at=stored.created_at,
        expires_at=stored.expires_at,
        filename=stored.filename,
        purpose=stored.purpose,
    )


def to_batch(batch: objects.Batch) -> BatchObject:
    own = ("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")
    times = [name for name in BatchObject.__struct_fields__ if name.endswith("_at")]
    return BatchObject(
        **{name: getattr(batch, name) for name in (*own, *times)},
        errors=BatchErrors(data=batch.errors) if batch.errors else None,
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        metadata=batch.metadata,
    )
