"""NVIDIA's tritonclient: models that come and go, keys, and a server that stops."""

from __future__ import annotations

import re
import signal
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.clients.tritonclient_kit import (
    GRPC,
    HTTP,
    MADE,
    MODELS,
    TEXTS,
    TRANSPORTS,
    Answer,
    assert_vectors,
    connect,
    serving,
    stream,
    streamed,
)
from tests.integration.llm_kit import until


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_load_and_unload(tmp_path: Path, transport: str) -> None:
    """Without keys, by programs on this machine; over HTTP they have to say that they send JSON."""
    options = {"headers": {"content-type": "application/json"}} if transport in HTTP else {}
    with serving(tmp_path, *MODELS[:2]) as service:
        async with connect(transport, service.address(transport)) as client:
            if transport in HTTP:
                assert "application/json" in await client.refuse(403, "unload_model", "scorer")
            await client.call("unload_model", "scorer", **options)
            assert not await client.call("is_model_ready", "scorer")
            await client.refuse_infer(404, "scorer", client.texts(["a"], "query"), client.texts(["b"], "document"))
            assert (await client.states()).get("words") == "READY"
            assert (await client.states()).get("scorer") == "UNAVAILABLE"
            await client.call("load_model", "scorer", **options)
            assert await client.call("is_model_ready", "scorer")
            await client.infer("scorer", client.texts(["a"], "query"), client.texts(["b"], "document"))
            assert "'config'" in await client.refuse(400, "load_model", "scorer", config="{}", **options)
            assert "nobody" in await client.refuse(404, "unload_model", "nobody", **options)
        assert "Traceback" not in service.server.log.read_text()


REFUSED = "API key|no longer in valid state|RST_STREAM|[Cc]ancelled"
"""In the server's words, or in those of a client that was still sending when the answer came."""


async def refusal_of(streaming: Awaitable[list[Answer]]) -> str:
    """Return why a stream ended, as its client says it: in an answer, or by an error of the call."""
    try:
        return str((await streaming)[0].error)
    except (InferenceServerException, grpc.aio.AioRpcError) as error:
        return str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_keys(tmp_path: Path, transport: str) -> None:
    """A user's key is needed for all but health, and an admin's to change models."""

    def key(value: str) -> dict[str, Any]:
        return {"headers": {"authorization": f"Bearer {value}"}}

    with serving(tmp_path, *MODELS[:2], flags=("--api-key", "K", "--admin-key", "A")) as service:
        async with connect(transport, service.address(transport)) as client:
            text = client.texts(TEXTS)
            assert await client.call("is_server_ready")
            await client.refuse(401, "get_server_metadata")
            await client.refuse_infer(401, "words", text)
            await client.refuse_infer(401, "words", text, **key("other"))
            assert_vectors(await client.infer("words", text, **key("K")), TEXTS)
            await client.refuse(403, "unload_model", "scorer", **key("K"))
            assert await client.call("is_model_ready", "scorer", **key("K"))
            if transport in GRPC:
                requests = [streamed("words", [text], "k1")]
                assert re.search(REFUSED, await refusal_of(stream(service, transport, requests)))
                assert_vectors((await stream(service, transport, requests, **key("K")))[0].result, TEXTS)
            await client.call("unload_model", "scorer", **key("A"))
            await client.call("load_model", "scorer", **key("A"))
            assert await client.call("is_model_ready", "scorer", **key("K"))


def test_a_graceful_stop(tmp_path: Path) -> None:
    """Requests in flight are answered after SIGTERM, those of a stream too."""
    with serving(tmp_path, MODELS[-1]) as service, tritonclient.grpc.InferenceServerClient(service.grpc) as raw:
        answers: list[Answer] = []
        raw.start_stream(lambda result, error: answers.append(Answer.read(result, error)))
        raw.async_stream_infer("slow", MADE.prompt("word " * 40, stream=True), request_id="s1")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(raw.infer, "slow", [MADE.texts(TEXTS)])
            until(lambda: service.in_flight() == 2)
            service.server.process.send_signal(signal.SIGTERM)
            assert_vectors(waiting.result(timeout=30), TEXTS)
        raw.stop_stream()
        assert "".join(each.text for each in answers).split() == ["word"] * 40
        assert answers[-1].final
        assert service.server.exit_code() == 0
