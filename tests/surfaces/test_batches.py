"""OpenAI's files and batches over HTTP: fields, pages, errors, owners, uploads."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from shoal.app.surfaces import start_desk
from shoal.batches import BatchDesk, Limits
from shoal.core.gateway import Gateway
from shoal.core.registry import Model, Registry
from shoal.http.hand_over import is_for_models
from shoal.http.openapi import build_document, list_operations
from shoal.surfaces import Options, build_app, build_surfaces
from shoal.surfaces.batches import Batches
from tests.surfaces.surface_kit import MODEL, Answer, Exchange, RecordingRunner, Server, request_scope, serve

MB = 1 << 20
URL = "/v1/embeddings"
LINES = b"".join(
    json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"model": MODEL, "input": name}}).encode()
    + b"\n"
    for name in ("a", "bb")
)
DOCUMENT = build_document({"batches": list_operations(Batches(Options()), Gateway(Registry()))})


@asynccontextmanager
async def serving(
    folder: Path, runner: RecordingRunner | None = None, *, max_disk_bytes: int = MB, **options: Any
) -> AsyncIterator[Server]:
    """Serve one model, with batches in `folder`."""
    registry = Registry()
    registry.add(model := Model(name=MODEL, created=1_700_000_000))
    runner = runner or RecordingRunner()
    model.mark_loaded(runner)
    gateway = Gateway(registry)
    settings = Options(**options)
    desk = BatchDesk(folder, Limits(max_disk_bytes=max_disk_bytes), grace_s=0.0)
    app = build_app(gateway, build_surfaces(settings, desk), settings)
    start_desk(desk, app)
    try:
        yield Server(app, runner, gateway, model)
    finally:
        await desk.aclose()


def form(
    content: bytes | None = LINES, name: str = "in.jsonl", more: dict[str, str] | None = None, **fields: str
) -> bytes:
    parts = [(f'name="{key}"', value.encode()) for key, value in {**fields, **(more or {})}.items()]
    if content is not None:
        parts.append((f'name="file"; filename="{name}"\r\ncontent-type: application/jsonl', content))
    body = b"".join(b"--XX\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (a.encode(), b) for a, b in parts)
    return body + b"--XX--\r\n"


FORM = {"content-type": "multipart/form-data; boundary=XX"}


def check(method: str, path: str, answer: Answer) -> Any:
    """Check that an answer matches the document, and return its JSON."""
    schema = DOCUMENT["paths"][path][method]["responses"][str(answer.status)]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer.json())
    return answer.json()


async def upload(
    server: Server, body: bytes | Iterable[bytes] | None = None, headers: dict[str, str] | None = None
) -> Answer:
    body = form(purpose="batch") if body is None else body
    return await server.call("POST", "/v1/files", body=body, headers={**FORM, **(headers or {})})


async def create(server: Server, file_id: str, headers: dict[str, str] | None = None, **changes: Any) -> Answer:
    payload = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **changes}
    return await server.call("POST", "/v1/batches", payload, headers=headers)


async def wait_for_end(server: Server, batch_id: str, **headers: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            batch = (await server.call("GET", f"/v1/batches/{batch_id}", headers=headers)).json()
            if batch["status"] in {"completed", "failed", "cancelled"}:
                return batch
            await asyncio.sleep(0.005)


async def test_a_batch_answers_as_the_route(tmp_path: Path) -> None:
    """The results are the bodies that the route returns, of requests by the client who made the batch, as bulk. All
    objects are as documented."""
    async with serving(tmp_path, api_key=("k",)) as server:
        key = {"authorization": "Bearer k"}
        file = check("post", "/v1/files", await upload(server, headers=key))
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(LINES), "in.jsonl", "batch")
        assert file["expires_at"] - file["created_at"] == 30 * 86_400
        begun = check("post", "/v1/batches", await create(server, file["id"], key, metadata={"a": "b"}))
        assert begun["metadata"] == {"a": "b"}
        batch = await wait_for_end(server, begun["id"], **key)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert batch["error_file_id"] is None
        content = await server.call("GET", f"/v1/files/{batch['output_file_id']}/content", headers=key)
        assert content.headers["content-type"] == "application/octet-stream"
        results = {each["custom_id"]: each for each in map(json.loads, content.body.splitlines())}
        assert set(results) == {"a", "bb"}
        direct = await server.call("POST", URL, {"model": MODEL, "input": "bb"}, headers=key)
        assert results["bb"]["response"]["body"] == direct.json()
        *own, last = server.runner.contexts
        assert {(each.traffic, each.client) for each in own} == {("bulk", last.client)}
        assert {each.id for each in own} == {each["response"]["request_id"] for each in results.values()}


async def test_lists(tmp_path: Path) -> None:
    """Files come newest first, or in another order, and in pages; so do batches."""
    async with serving(tmp_path) as server:
        names = [(await upload(server)).json()["id"] for _ in range(3)]

        async def listed(query: str, path: str = "/v1/files") -> Any:
            return check("get", path, await server.call("GET", path + query))

        page = await listed("?limit=2")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([names[2], names[1]], True)
        assert (page["first_id"], page["last_id"]) == (names[2], names[1])
        page = await listed(f"?limit=2&after={names[1]}")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([names[0]], False)
        assert [each["id"] for each in (await listed("?order=asc"))["data"]] == names
        assert (await listed("?purpose=batch_output"))["data"] == []
        batches = [(await create(server, name)).json()["id"] for name in names]
        page = await listed("?limit=1", "/v1/batches")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (batches[2:], True)
        for path, query in (
            ("/v1/files", "?limit=0"),
            ("/v1/files", "?limit=x"),
            ("/v1/files", "?order=up"),
            ("/v1/files", "?after=file-x"),
            ("/v1/batches", "?limit=101"),
        ):
            answer = await server.call("GET", path + query)
            assert answer.status == 400
            assert check("get", path, answer)["error"]["param"] == query[1:].partition("=")[0]
        for batch in batches:
            await wait_for_end(server, batch)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (form(), 400, "purpose"),
        (form(purpose="fine-tune"), 400, "purpose"),
        (form(None, purpose="batch"), 400, "file"),
        (form(b"", purpose="batch"), 400, "file"),
        (form(None, purpose="batch", file="text"), 400, "file"),
        (form(purpose="batch")[:-4], 400, None),
        (form(purpose="batch")[:-8] + form(purpose="batch"), 400, None),
        (form(purpose="x" * 70_000), 400, None),
        (form(purpose="batch", more={f"f{each}": "" for each in range(20)}), 400, None),
        (form(purpose="batch", more={"expires_after[seconds]": "10"}), 400, "expires_after"),
        (b"none", 400, None),
        (form(b"x" * (MB + 1), purpose="batch"), 413, "file"),
        (form(b"x" * 9, purpose="batch") + b"x" * (MB + 82_000), 413, None),
        (form(b"x" * 600_000, purpose="batch"), 413, None),
    ],
)
async def test_refused_uploads(tmp_path: Path, body: bytes, status: int, param: str | None) -> None:
    """Each says which field is wrong, and leaves nothing on disk."""
    async with serving(tmp_path, batch_file_mb=1, max_disk_bytes=500_000 if len(body) < MB else 4 * MB) as server:
        pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
        answer = await upload(server, pieces)
        assert answer.status == status, answer.body
        assert check("post", "/v1/files", answer)["error"]["param"] == param
        assert os.listdir(tmp_path) == ["lock"]
        assert (await upload(server)).status == 200


async def test_an_upload_is_not_a_form(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for kind in ("application/json", "multipart/form-data"):
            assert (await upload(server, headers={"content-type": kind})).status == 400


async def test_an_upload_keeps_its_bytes(tmp_path: Path) -> None:
    """However the body is cut, and with a boundary's beginning in it; the name loses its folders."""
    content = b"{}\r\n--X\r\n\r\n -XX--XX\r\n-\r\n--\r" + bytes(range(256)) * 5000
    async with serving(tmp_path, max_disk_bytes=4 * MB) as server:
        for size in (65_536, 3, len(content)):
            body = form(content[: 3000 if size == 3 else None], "../a\\b.jsonl", purpose="batch")
            file = (await upload(server, [body[at : at + size] for at in range(0, len(body), size)])).json()
            assert file["filename"] == "b.jsonl"
            read = await server.call("GET", f"/v1/files/{file['id']}/content")
            assert read.body == content[: 3000 if size == 3 else None]


async def test_expiry_is_the_clients_choice(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(server, form(purpose="batch", more=fields))).json()
        assert file["expires_at"] - file["created_at"] == 3600
        expiry = {"anchor": "created_at", "seconds": 7200}
        batch = await wait_for_end(server, (await create(server, file["id"], output_expires_after=expiry)).json()["id"])
        output = (await server.call("GET", f"/v1/files/{batch['output_file_id']}")).json()
        assert output["expires_at"] - output["created_at"] == 7200


async def test_a_client_that_leaves_or_stalls(tmp_path: Path) -> None:
    """Half of an upload is removed."""
    async with serving(tmp_path, body_timeout_s=0.05) as server:
        body = form(purpose="batch")
        stalled = Exchange([body[:100], body[100:]])
        receive = stalled.receive

        async def receive_once() -> dict[str, Any]:
            if stalled.reads:
                await asyncio.sleep(30)
            return await receive()

        await server.app(request_scope("POST", "/v1/files", FORM), receive_once, stalled.send)
        assert stalled.answer().status == 408
        leaving = Exchange([])
        leaving.leave()
        await server.app(request_scope("POST", "/v1/files", FORM), leaving.receive, leaving.send)
        assert leaving.answer().status == 499
        assert os.listdir(tmp_path) == ["lock"]


async def test_uploads_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, and in time."""
    async with serving(tmp_path) as server:
        monkeypatch.setattr("shoal.surfaces.batches.MAX_UPLOAD_S", 0.05)
        endless = Exchange([form(purpose="batch")], silent=True)
        await server.app(request_scope("POST", "/v1/files", FORM), endless.receive, endless.send)
        assert endless.answer().status == 408
        monkeypatch.setattr("shoal.batches.desk.MAX_UPLOADS", 0)
        assert (await upload(server)).status == 429


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_refused_batches(tmp_path: Path, changes: dict[str, Any], param: str) -> None:
    async with serving(tmp_path) as server:
        answer = await create(server, (await upload(server)).json()["id"], **changes)
        assert answer.status == 400
        assert check("post", "/v1/batches", answer)["error"]["param"] == param


async def test_cancel_and_delete(tmp_path: Path) -> None:
    """A file is deleted once no batch needs it; a batch that has ended cannot be cancelled."""
    runner = RecordingRunner(release=asyncio.Event())
    async with serving(tmp_path, runner) as server:
        file = (await upload(server)).json()["id"]
        batch = (await create(server, file)).json()["id"]
        await runner.begun.wait()
        assert (await server.call("DELETE", f"/v1/files/{file}")).status == 409
        cancelled = check("post", "/v1/batches/{id}/cancel", await server.call("POST", f"/v1/batches/{batch}/cancel"))
        assert cancelled["status"] == "cancelling"
        assert (await wait_for_end(server, batch))["status"] == "cancelled"
        assert runner.cancelled == 2
        assert (await server.call("POST", f"/v1/batches/{batch}/cancel")).status == 409
        deleted = check("delete", "/v1/files/{id}", await server.call("DELETE", f"/v1/files/{file}"))
        assert deleted == {"id": file, "object": "file", "deleted": True}
        assert (await server.call("DELETE", f"/v1/files/{file}")).status == 404
        assert (await server.call("GET", f"/v1/files/{file}/content")).status == 404


async def test_two_users(tmp_path: Path) -> None:
    """Each key has its own files and batches; an admin key sees all; a key that is no admin key does not, even from
    this machine."""
    async with serving(tmp_path, api_key=("one", "two"), admin_key=("root",)) as server:
        one, two, root = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "root"))
        file = (await upload(server, headers=one)).json()["id"]
        batch = (await create(server, file, one)).json()["id"]
        await wait_for_end(server, batch, **one)
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
            for headers, status in ((one, 200), (two, 404), (root, 200)):
                assert (await server.call("GET", path, headers=headers)).status == status
        assert (await create(server, file, two)).status == 400
        for headers, count in ((one, 2), (two, 0), (root, 2)):
            assert len((await server.call("GET", "/v1/files", headers=headers)).json()["data"]) == count
    async with serving(tmp_path, api_key=("one", "two")) as server:
        assert (await server.call("GET", f"/v1/files/{file}", headers=one)).status == 200
        assert (await server.call("GET", f"/v1/files/{file}", headers=two)).status == 404


@pytest.mark.parametrize(
    ("keys", "status"), [(("two",), "failed"), (("two", "one bulk"), "completed"), ((), "completed")]
)
async def test_a_batch_whose_key_was_removed(tmp_path: Path, keys: tuple[str, ...], status: str) -> None:
    """It fails at the next start, unless the server needs no keys any more."""
    runner = RecordingRunner(release=asyncio.Event())
    one, root = ({"authorization": f"Bearer {key}"} for key in ("one", "root"))
    async with serving(tmp_path, runner, api_key=("one", "two"), admin_key=("root",)) as server:
        batch = (await create(server, (await upload(server, headers=one)).json()["id"], one)).json()["id"]
        await runner.begun.wait()
    async with serving(tmp_path, api_key=keys, admin_key=("root",)) as server:
        ended = await wait_for_end(server, batch, **root)
        assert ended["status"] == status
        codes = [each["code"] for each in (ended["errors"] or {"data": []})["data"]]
        assert codes == (["invalid_api_key"] if status == "failed" else [])


async def test_another_client_cannot_claim_to_be_the_server(tmp_path: Path) -> None:
    """A request has the identity of its key, whatever its headers say."""
    async with serving(tmp_path, api_key=("one",)) as server:
        headers = {"shoal.caller": "key:x", "x-shoal-caller": "key:x"}
        assert (await server.call("POST", URL, {"model": MODEL, "input": "a"}, headers=headers)).status == 401


async def test_a_server_without_a_desk() -> None:
    """It says how to start one that runs batches."""
    answer = await serve().call("GET", "/v1/files")
    assert answer.status == 400
    assert "shoal serve" in answer.json()["error"]["message"]


def test_one_process_has_the_batches() -> None:
    """With `--workers`, all of these routes are answered by the process of the models."""
    assert all(is_for_models(each) for each in Batches(Options()).routes(Gateway(Registry())))


def test_the_form_is_documented() -> None:
    """A file and its purpose, and no JSON."""
    body = DOCUMENT["paths"]["/v1/files"]["post"]["requestBody"]
    assert body["required"]
    assert list(body["content"]) == ["multipart/form-data"]
