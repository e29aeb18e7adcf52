"""Lines of batches: requests are read and checked, results and the ids of finished lines are written and read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.batches.objects import LineError
from shoal.decoding import json_decoder

ENDPOINTS = ("/v1/embeddings", "/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_LINES = 50_000
MAX_ERRORS = 100
"""Maximum errors reported about one file."""
MAX_ID_CHARS = 512
LINES_PER_TURN = 64

_ENCODE = msgspec.json.Encoder().encode


class Line(NamedTuple):
    """A request of a batch. `number` is counted from 0 and skips blank lines; `body` is JSON."""

    number: int
    custom_id: str
    body: bytes


class Scan(NamedTuple):
    """What a file contains: its number of requests, what is wrong with it, and a byte for each request that is 1 if
    the request is finished."""

    total: int
    errors: list[LineError]
    finished: bytearray


class Answer(NamedTuple):
    """The answer to a request. `retry_after`: what the reply said, in seconds; `may_retry`: false if the reply said
    that another try fails."""

    status: int
    request_id: str
    body: bytes
    retry_after: float | None = None
    may_retry: bool = True


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None


class _Result(msgspec.Struct):
    custom_id: str


_decode_request = json_decoder(_Request).decode
_decode_body = json_decoder(_Body).decode
_decode_result = json_decoder(_Result).decode
_decode_raw = json_decoder(msgspec.Raw).decode
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BadLine(Exception):
    """A line that cannot be run; `error` lacks the number of the line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code=code, message=message, param=param)


def parse_line(text: bytes, number: int, endpoint: str) -> Line:
    """Parse one request for `endpoint`. Raises BadLine."""
    try:
        request = _decode_request(text)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_request", f"This line is not a request: {error}.") from None
    except _NOT_JSON:
        raise BadLine("invalid_json_line", "This line is not parseable as valid JSON.") from None
    if not 0 < len(request.custom_id) <= MAX_ID_CHARS:
        raise BadLine("invalid_custom_id", f"'custom_id' must have 1 to {MAX_ID_CHARS} characters.", "custom_id")
    if request.method != "POST":
        raise BadLine("invalid_method", "'method' must be POST.", "method")
    if request.url != endpoint:
        raise BadLine("mismatched_endpoint", f"'url' must be the endpoint of the batch, {endpoint}.", "url")
    body = bytes(request.body)
    if not body.startswith(b"{"):
        raise BadLine("invalid_body", "'body' must be an object.", "body")
    try:
        streams = _decode_body(body).stream
    except _NOT_JSON:
        raise BadLine("invalid_json_line", "'body' is not parseable as valid JSON.", "body") from None
    if streams:
        raise BadLine("invalid_body", "'stream' is not supported in a batch; leave it out.", "body.stream")
    return Line(number, request.custom_id, body)


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number in the file, from 1. One that exceeds `max_bytes` is cut,
    which makes it longer than that by one byte."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_bytes + 1):
            number += 1
            if number % LINES_PER_TURN == 0:
                time.sleep(0)  # lets the event loop have the interpreter
            rest = text
            while not rest.endswith(b"\n") and (rest := file.readline(max_bytes + 1)):
                pass
            if text.strip():
                yield number, text


def scan_file(path: Path, endpoint: str, max_bytes: int, done: set[str]) -> Scan:
    """Check a file of requests. `done`: the ids of finished ones. Blocks, in proportion to the size of the file."""
    errors: list[LineError] = []
    seen: set[str] = set()
    finished = bytearray()
    for number, text in read_lines(path, max_bytes):
        if len(finished) == MAX_LINES:
            errors.append(LineError(code="too_many_requests", message=f"A batch has at most {MAX_LINES} requests."))
            break
        try:
            if len(text) > max_bytes:
                raise BadLine("line_too_long", f"This line has more than {max_bytes} bytes.")
            line = parse_line(text, len(finished), endpoint)
            if line.custom_id in seen:
                raise BadLine("duplicate_custom_id", "Another line has the same 'custom_id'.", "custom_id")
            seen.add(line.custom_id)
            finished.append(line.custom_id in done)
        except BadLine as bad:
            bad.error.line = number
            errors.append(bad.error)
            finished.append(0)
        if len(errors) == MAX_ERRORS:
            break
    if not finished:
        errors.append(LineError(code="empty_file", message="The file has no requests."))
    return Scan(len(finished), errors, finished)


def unfinished_lines(path: Path, endpoint: str, max_bytes: int, finished: bytearray) -> Iterator[Line]:
    """Yield the requests of a checked file that `finished` does not mark when they are reached."""
    for at, (_, text) in enumerate(read_lines(path, max_bytes)):
        if not finished[at]:
            yield parse_line(text, at, endpoint)


def take_lines(lines: Iterator[Line], count: int, max_bytes: int) -> list[Line]:
    """Take up to `count` lines, and fewer if their bodies reach `max_bytes`; an empty list is the end."""
    taken: list[Line] = []
    size = 0
    while len(taken) < count and size < max_bytes and (line := next(lines, None)) is not None:
        taken.append(line)
        size += len(line.body)
    return taken


def encode_answer(result_id: str, custom_id: str, answer: Answer) -> bytes:
    """Return the line of an answer. A body that is not JSON becomes a string."""
    body = answer.body
    try:
        _decode_raw(body)
        if b"\n" in body:
            body = _ENCODE(msgspec.json.decode(body))
    except _NOT_JSON:
        body = _ENCODE(body.decode(errors="replace"))
    return b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        result_id.encode(),
        _ENCODE(custom_id),
        answer.status,
        _ENCODE(answer.request_id),
        body,
    )


def encode_failure(result_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that was not run."""
    error = {"code": code, "message": message}
    return _ENCODE({"id": result_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def recover_ids(path: Path) -> Iterable[str]:
    """Return the ids of a file of results, and cut off what a crash left unfinished at its end."""
    found: list[str] = []
    if not path.exists():
        return found
    size = 0
    with path.open("r+b") as file:
        for text in file:
            try:
                custom_id = _decode_result(text).custom_id
            except _NOT_JSON:
                break
            if not text.endswith(b"\n"):
                break
            found.append(custom_id)
            size += len(text)
        if size < os.fstat(file.fileno()).st_size:
            file.truncate(size)
    return found


MAX_PAUSE_S = 60.0
MAX_TRIES = 3
"""Maximum tries of a request that times out or whose model crashes. Overload is retried until the batch ends."""


def choose_pause(answer: Answer, tries: int) -> float | None:
    """Return the seconds until the next of a request that was tried `tries` times; None: the answer is final."""
    busy = answer.status in {429, 503}
    if not answer.may_retry or not (busy or (answer.status in {502, 504} and tries < MAX_TRIES)):
        return None
    pause = answer.retry_after if answer.retry_after is not None else 0.5 * 2.0 ** min(tries, 10)
    return float(min(max(pause, 0.1), MAX_PAUSE_S))
