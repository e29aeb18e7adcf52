"""`shoal serve --workers 2`: several processes that serve as one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.llm_kit import metric
from tests.integration.server_kit import LISTENING, PATIENCE_S, Processes, Server, ShoalServer, wait_until

MODELS = [
    "fake:",
    "rank=fake:labels=1",
    "class=fake:labels=3",
    "sparse=fake:vectors=dense+sparse",
    "image=fake:images=1",
]
WORKERS = ("--workers", "2")
BODY = {"model": "fake", "input": "Hello"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "one two three"}]}
CONFIG = '[models."second"]\nbackends = ["fake:dimension=8"]\n'


def children(server: Server) -> dict[str, list[int]]:
    """Return the ids of the processes by role: "models" and "front"."""
    found: dict[str, list[int]] = {"models": [], "front": []}
    listed = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    for pid in map(int, listed.split()):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        for role, pids in found.items():
            if role.encode() in arguments:
                pids.append(pid)
    return found


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def served_by(connection: HTTPConnection, server: Server) -> int:
    """Return the front whose process has a connection."""
    assert connection.sock is not None
    port = connection.sock.getsockname()[1]
    here = f":{server.port:04X}", f":{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(here[0]) and fields[2].endswith(here[1]):
            inode = f"socket:[{fields[9]}]"
            for pid in children(server)["front"]:
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    try:
                        if os.readlink(file) == inode:
                            return pid
                    except OSError:
                        continue
    raise AssertionError("no front has the connection")


@contextmanager
def connect_to_each(server: Server) -> Iterator[dict[int, HTTPConnection]]:
    """Yield an open connection to each front, by its process id."""
    found: dict[int, HTTPConnection] = {}
    end = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        while len(found) < 2:
            assert time.monotonic() < end
            connection = stack.enter_context(closing(HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)))
            connection.request("GET", "/health")
            connection.getresponse().read()
            found.setdefault(served_by(connection, server), connection)
        yield found


def ask(connection: HTTPConnection, path: str = "/v1/embeddings", body: Any = BODY) -> tuple[int, Any]:
    """Send a request over an open connection, a GET without a body, and return its status and its JSON."""
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def is_ready(connection: HTTPConnection) -> bool:
    connection.request("GET", "/health/ready")
    reply = connection.getresponse()
    reply.read()
    return reply.status == 200


@pytest.fixture(scope="module")
def single(shared_server: ShoalServer) -> Server:
    return shared_server(MODELS)


@pytest.fixture(scope="module")
def several(shared_server: ShoalServer) -> Server:
    return shared_server(MODELS, *WORKERS)


VARIABLE = re.compile(
    rb'"(id|created|created_at|completed_at|modified_at|last_used|\w*duration|item_id|response_id|\w+_ms'
    rb'|\w+_per_second|last_inference|ns)": ?("[^"]*"|[0-9.e-]+|null)'
)
GENERATED_ID = re.compile(rb"(chatcmpl|cmpl|resp|msg|req|embd|rerank)[-_][0-9a-zA-Z]+")
VARIABLE_HEADERS = ("date", "x-request-id", "content-length")


def comparable(reply: tuple[int, dict[str, str], bytes]) -> tuple[int, list[str], bytes]:
    """Remove ids and times from a reply."""
    status, headers, body = reply
    names = [f"{name}: {value}" for name, value in headers.items() if name in ("content-type", "allow", "retry-after")]
    names += sorted(name for name in headers if name not in VARIABLE_HEADERS)
    return status, names, GENERATED_ID.sub(b"ID", VARIABLE.sub(rb'"\1":0', body))


EQUAL: list[tuple[str, str, Any]] = [
    ("POST", "/v1/embeddings", BODY),
    ("POST", "/v1/embeddings", {**BODY, "input": ["a b", "c", "a b"], "encoding_format": "base64"}),
    ("POST", "/v1/embeddings", {**BODY, "dimensions": 8}),
    ("POST", "/v1/embeddings", {**BODY, "model": "nobody"}),
    ("POST", "/v1/embeddings", {**BODY, "input": []}),
    ("POST", "/v1/embeddings", {**BODY, "input": 5}),
    ("POST", "/v1/embeddings", {**BODY, "input": ["a"] * 2049}),
    ("POST", "/v1/embeddings", {**BODY, "input": "poison-item"}),
    ("POST", "/v1/embeddings", {**BODY, "input": "reject-item"}),
    ("POST", "/v1/embeddings", {**BODY, "input": "nan-item"}),
    ("POST", "/v1/embeddings", {**BODY, "input": "\udcff"}),
    ("GET", "/v1/embeddings", None),
    ("POST", "/embed", {"inputs": "a b"}),
    ("POST", "/embed", {"inputs": [], "truncate": True}),
    ("POST", "/embed", {"inputs": "word " * 600, "truncate": False}),
    ("POST", "/embed_sparse", {"inputs": "a b", "model": "sparse"}),
    ("POST", "/rerank", {"query": "q", "texts": ["a", "b"], "return_text": True}),
    ("POST", "/v1/rerank", {"model": "rank", "query": "q", "documents": ["a", "b"]}),
    ("POST", "/predict", {"inputs": "a"}),
    ("POST", "/classify", {"model": "class", "input": "a"}),
    ("POST", "/tokenize", {"inputs": "a b"}),
    ("POST", "/tokenize", {"model": "fake", "prompt": "a b"}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "rank"}),
    ("POST", "/v1/chat/completions", {**CHAT, "messages": []}),
    ("POST", "/v1/completions", {"model": "fake", "prompt": ["a b", "c"], "n": 2}),
    ("POST", "/v1/responses", {"model": "fake", "input": "a b"}),
    ("POST", "/api/chat", {**CHAT, "stream": False}),
    ("POST", "/api/embed", BODY),
    ("POST", "/api/show", {"model": "fake"}),
    ("GET", "/api/tags", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/rank", None),
    ("GET", "/v1/models/nobody", None),
    ("GET", "/v2/models/fake", None),
    ("GET", "/info", None),
    ("GET", "/health", None),
    ("GET", "/health/ready", None),
    ("HEAD", "/v1/models", None),
    ("OPTIONS", "/v1/models", None),
    ("DELETE", "/v1/embeddings", None),
    ("GET", "/nowhere", None),
    ("POST", "/models/unload", {"model": "nobody"}),
    ("POST", "/models/load", {}),
    ("GET", "/openapi.json", None),
]


@pytest.mark.parametrize(("method", "path", "body"), EQUAL, ids=lambda value: str(value)[:60])
def test_an_answer_is_that_of_a_single_process(
    single: Server, several: Server, method: str, path: str, body: Any
) -> None:
    """Status, headers and body are equal, whichever front answers."""
    expected = comparable(single.request(method, path, body))
    for _ in range(3):
        got = comparable(several.request(method, path, body))
        if path == "/openapi.json":  # it names the server's own address
            got = (*got[:2], got[2].replace(b"%d" % several.port, b"%d" % single.port))
        assert got == expected


def test_a_large_body_is_refused_as_by_a_single_process(single: Server, several: Server) -> None:
    """A body over the limit is a 413, for a front's own routes and for those of the model process."""
    for path in ("/v1/embeddings", "/models/load"):
        replies = []
        for server in (single, several):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            connection.request("POST", path, b" " * 17_000_000, {"content-type": "application/json"})
            reply = connection.getresponse()
            replies.append((reply.status, reply.getheader("connection"), reply.read()))
            connection.close()
        assert replies[0] == replies[1]
        assert replies[0][0] == 413


def test_the_openai_client_reads_streams(several: Server) -> None:
    """A stream of many chunks arrives whole, over many connections."""
    words = " ".join(f"word{number}" for number in range(400))
    for _ in range(4):
        with openai.OpenAI(base_url=f"{several.base_url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": words}], stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == words


def test_a_stored_response_is_known_to_all_fronts(several: Server) -> None:
    """Stored through one front, it is gone on from, streamed, and read through each."""
    question = {"model": "fake", "input": "one"}
    with connect_to_each(several) as connections:
        for connection in connections.values():
            status, first = ask(connection, "/v1/responses", question)
            assert (status, first["store"]) == (200, True)
            for other in connections.values():
                status, again = ask(other, "/v1/responses", {**question, "previous_response_id": first["id"]})
                assert (status, again["previous_response_id"]) == (200, first["id"])
                assert ask(other, f"/v1/responses/{first['id']}", None) == (200, first)
            status, unstored = ask(connection, "/v1/responses", {**question, "store": False})
            assert (status, unstored["store"]) == (200, False)


def test_pipelined_requests_are_answered_in_order(several: Server) -> None:
    """Requests of both kinds, sent in one piece, are answered one after the other."""
    body = json.dumps(BODY).encode()
    head = b"HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    embed = b"POST /v1/embeddings " + head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    models, last = b"GET /v1/models/fake " + head + b"\r\n", b"GET /x " + head + b"connection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", several.port), timeout=PATIENCE_S) as client:
        client.sendall((embed % (len(body), body) + models) * 3 + last)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    kinds = [b'"embedding"' in part for part in received.split(b"HTTP/1.1 200")[1:]]
    assert kinds == [True, False] * 3
    assert received.count(b"HTTP/1.1 404") == 1


def test_metrics_are_summed(shoal_server: ShoalServer) -> None:
    """Requests over many connections are counted once each, rejected ones too; processes are summed."""
    server = shoal_server(["fake:"], *WORKERS)
    for number in range(40):
        assert server.request("POST", "/v1/embeddings", BODY)[0] == 200
        if number % 4 == 0:
            assert server.request("POST", "/v1/embeddings", {**BODY, "model": "nobody"})[0] == 404
            assert server.request("GET", "/nowhere")[0] == 404
    for _ in range(4):  # whichever front is asked
        text = server.request("GET", "/metrics")[2].decode()
        counted = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("shoal_requests_total") or line.startswith("shoal_refused")
        }
        assert [value for name, value in counted.items() if "ok" in name] == [40.0], counted
        assert sum(value for name, value in counted.items() if "not_found" in name) == 20.0, counted
    own = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[0]) * 1024
    assert metric(server, "process_resident_memory_bytes") > 2 * own


@pytest.fixture
def with_second(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text(CONFIG)


@pytest.mark.usefixtures("with_second")
def test_a_loaded_model_is_served_at_once_by_all_fronts(shoal_server: ShoalServer) -> None:
    """After the answer of a load, no connection ever gets a 404, and after that of an unload none gets an answer."""
    server = shoal_server(["fake:"], *WORKERS)
    for _ in range(4):
        assert server.request("POST", "/models/load", {"model": "second"})[0] == 200
        wait_until(lambda: b'"second"' in server.request("GET", "/v1/models")[2], server.process, server.log)
        status = "loading"
        while status != "loaded":
            _, _, body = server.request("GET", "/v1/models/second")
            status = json.loads(body)["status"]["value"]
        for _ in range(12):
            assert server.request("POST", "/v1/embeddings", {**BODY, "model": "second"})[0] == 200
        unloaded = server.request("POST", "/models/unload", {"model": "second"})
        assert unloaded[0] == 200, unloaded
        status = "loaded"
        while status == "loaded":
            reply = server.request("GET", "/v1/models/second")
            status = json.loads(reply[2])["status"]["value"] if reply[0] == 200 else "gone"
        for _ in range(12):
            assert server.request("POST", "/v1/embeddings", {**BODY, "model": "second"})[0] == 404


@pytest.mark.usefixtures("with_second")
def test_a_loaded_model_comes_back_with_the_model_process(shoal_server: ShoalServer) -> None:
    """A model that a client has loaded is loaded again after a SIGKILL; before, requests for it are a 503."""
    server = shoal_server(["fake:"], *WORKERS)
    second = {**BODY, "model": "second"}
    assert server.request("POST", "/models/load", {"model": "second"})[0] == 200
    wait_until(lambda: server.request("POST", "/v1/embeddings", second)[0] == 200, server.process, server.log)
    time.sleep(1.0)  # until it is written down
    [models] = children(server)["models"]
    os.kill(models, signal.SIGKILL)
    wait_until(lambda: models not in (children(server)["models"] or [models]), server.process, server.log)
    statuses = []

    def is_served() -> bool:
        statuses.append(server.request("POST", "/v1/embeddings", second)[0])
        return statuses[-1] == 200

    wait_until(is_served, server.process, server.log)
    assert set(statuses) <= {200, 502, 503}


def test_a_killed_front_is_replaced(shoal_server: ShoalServer) -> None:
    """Requests on its connections fail; those of the other front are answered, and new ones soon again."""
    server = shoal_server(["fake:delay_ms=300"], *WORKERS)
    with connect_to_each(server) as both, ThreadPoolExecutor() as pool:
        (victim, lost), (_, kept) = both.items()
        fronts = set(children(server)["front"])
        failing, served = pool.submit(ask, lost), pool.submit(ask, kept)
        wait_until(lambda: metric(server, "shoal_requests_in_flight") == 2, server.process, server.log)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises((OSError, HTTPException)):
            failing.result()
        assert served.result()[0] == 200
        statuses = [server.request("POST", "/v1/embeddings", BODY)[0] for _ in range(12)]
        assert len(set(children(server)["front"]) - fronts) == 1
    with connect_to_each(server) as both:
        assert [ask(connection)[0] for connection in both.values()] == [200, 200]
    assert set(statuses) == {200}
    assert "front process" in server.log.read_text()
    assert metric(server, "shoal_requests_in_flight") == 0


def test_a_stopped_front_is_replaced(shoal_server: ShoalServer) -> None:
    """A front that gets a SIGTERM of its own ends cleanly, and its replacement accepts connections again."""
    server = shoal_server(["fake:"], *WORKERS)
    victim, other = children(server)["front"]
    os.kill(victim, signal.SIGTERM)
    wait_until(lambda: victim not in children(server)["front"], server.process, server.log)
    wait_until(lambda: len(children(server)["front"]) == 2, server.process, server.log)
    for _ in range(12):
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
            assert ask(connection)[0] == 200
    with connect_to_each(server) as both:
        assert other in both


def test_a_killed_model_process_comes_back(shoal_server: ShoalServer) -> None:
    """Requests in flight get a JSON error at once, readiness fails, and then all is served again."""
    server = shoal_server(["fake:delay_ms=8000"], *WORKERS)
    [models] = children(server)["models"]
    with connect_to_each(server) as both, ThreadPoolExecutor() as pool:
        failing = [pool.submit(ask, connection) for connection in both.values()]
        wait_until(lambda: metric(server, "shoal_requests_in_flight") == 2, server.process, server.log)
        os.kill(models, signal.SIGKILL)
        for each in failing:
            status, body = each.result()
            assert status in (500, 502, 503), body
            assert "send the request again" in body["error"]["message"]
        assert server.request("GET", "/health/ready")[0] == 503
        status, headers, body = server.request("POST", "/v1/embeddings", BODY)
        assert (status, "retry-after" in headers) == (503, True), body
        assert server.request("GET", "/v1/models")[0] == 503
        for connection in both.values():
            wait_until(partial(is_ready, connection), server.process, server.log)
            connection.request("GET", "/v1/models")
            assert connection.getresponse().status == 200


IMPATIENT = "import shoal.workers.supervisor as s; s.HANG_TICKS = 8; from shoal.cli import main; main()"


def test_a_hanging_model_process_is_replaced(processes: Processes) -> None:
    """It is killed when it gives no sign of life, here after 8 s, and all is served again."""
    process, log = processes("-c", IMPATIENT, "serve", "fake:", "--port", "0", *WORKERS)
    wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
    found = LISTENING.search(log.read_text())
    assert found is not None
    server = Server(process, int(found[1]), log)
    wait_until(server.ready, process, log)
    [models] = children(server)["models"]
    os.kill(models, signal.SIGSTOP)
    wait_until(lambda: not is_running(models), process, log)
    wait_until(lambda: models not in (children(server)["models"] or [models]), process, log)
    with connect_to_each(server) as both:
        for connection in both.values():
            wait_until(partial(is_ready, connection), process, log)
            assert ask(connection)[0] == 200
    assert "has hung for 8 s and is killed" in log.read_text()


def is_connected(pid: int, port: int) -> bool:
    """Whether a process has a connection to a port."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(file))
        except OSError:
            continue
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(fields[2].endswith(f":{port:04X}") and f"socket:[{fields[9]}]" in sockets for fields in lines)


def test_a_model_of_another_server_needs_no_model_process(shoal_server: ShoalServer) -> None:
    """Fronts go straight to that server: their requests are counted by the model process, but go on without it."""
    upstream = shoal_server(["fake:"])
    address = f"fake=openai+http://127.0.0.1:{upstream.port}/v1#fake"
    server = shoal_server([address], *WORKERS)
    found = children(server)

    def both_are_counted() -> bool:
        """The fronts report what they have counted."""
        return metric(server, "shoal_requests_total", model="fake", outcome="ok", task="embed") == 2

    for pid in found["front"]:
        wait_until(partial(is_connected, pid, upstream.port), server.process, server.log)
    with connect_to_each(server) as both:
        for connection in both.values():
            assert ask(connection)[0] == 200
        wait_until(both_are_counted, server.process, server.log)
        os.kill(found["models"][0], signal.SIGSTOP)
        for connection in both.values():
            assert ask(connection)[0] == 200
            assert ask(connection, "/v1/chat/completions", {**CHAT, "stream": False})[0] == 200
        os.kill(found["models"][0], signal.SIGKILL)
        for connection in both.values():
            wait_until(lambda connection=connection: not is_ready(connection), server.process, server.log)  # type: ignore[misc]
            assert ask(connection)[0] == 200
        for connection in both.values():
            wait_until(partial(is_ready, connection), server.process, server.log)
            assert ask(connection)[0] == 200
        wait_until(both_are_counted, server.process, server.log)


def test_ejections_that_fronts_see_are_in_the_metrics(shoal_server: ShoalServer) -> None:
    """A replica that ends is ejected by the front that calls it; the answers come from the other one."""
    upstreams = [shoal_server(["fake:"]) for _ in range(2)]
    addresses = ",".join(f"openai+http://127.0.0.1:{each.port}/v1#fake" for each in upstreams)
    server = shoal_server([f"fake={addresses}"], *WORKERS)
    for pid in children(server)["front"]:
        wait_until(partial(is_connected, pid, upstreams[0].port), server.process, server.log)
    upstreams[0].process.kill()
    upstreams[0].process.wait()

    def is_counted() -> bool:
        assert server.request("POST", "/v1/embeddings", {**BODY, "input": str(time.monotonic())})[0] == 200
        return metric(server, "shoal_replica_ejections_total", model="fake") >= 1

    wait_until(is_counted, server.process, server.log)


def test_a_stop_answers_every_request(shoal_server: ShoalServer) -> None:
    """SIGTERM under load: accepted requests are answered, the exit code is 0, and no process is left."""
    server = shoal_server(["fake:delay_ms=1000:max_batch_size=4"], *WORKERS)
    pids = [pid for some in children(server).values() for pid in some]
    with ThreadPoolExecutor(24) as pool:
        pending = [pool.submit(server.request, "POST", "/v1/embeddings", {**BODY, "input": str(n)}) for n in range(12)]
        pending += [pool.submit(server.request, "POST", "/v1/chat/completions", CHAT) for _ in range(4)]
        wait_until(lambda: metric(server, "shoal_requests_in_flight") >= 12, server.process, server.log)
        server.process.send_signal(signal.SIGTERM)
        assert [each.result()[0] for each in pending] == [200] * 16
    assert server.exit_code() == 0
    assert not any(is_running(pid) for pid in pids)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert log.count("finishing requests in flight") == 1


def test_a_stop_of_every_process_answers_every_request(shoal_server: ShoalServer) -> None:
    """systemd sends SIGTERM to all processes of a unit, so each gets it twice, from systemd and from its parent."""
    server = shoal_server(["fake:delay_ms=3000"], *WORKERS)
    pids = [pid for some in children(server).values() for pid in some]
    with ThreadPoolExecutor() as pool:
        pending = [pool.submit(server.request, "POST", "/v1/embeddings", {**BODY, "input": str(n)}) for n in range(6)]
        wait_until(lambda: metric(server, "shoal_requests_in_flight") >= 6, server.process, server.log)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)  # else the two signals may become one
        server.process.send_signal(signal.SIGTERM)
        assert [each.result()[0] for each in pending] == [200] * 6
    assert server.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_no_process_outlives_its_supervisor(shoal_server: ShoalServer, number: signal.Signals) -> None:
    """Whatever ends the supervisor ends all of its processes."""
    server = shoal_server(["fake:"], *WORKERS)
    pids = [pid for some in children(server).values() for pid in some]
    assert len(pids) == 3
    server.process.send_signal(number)
    server.exit_code()
    end = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_second_signal_stops_at_once(shoal_server: ShoalServer) -> None:
    """The second SIGTERM drops what is in flight; the code is that of the signal, and no process is left."""
    server = shoal_server(["fake:delay_ms=60000"], *WORKERS)
    pids = [pid for some in children(server).values() for pid in some]
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(server.request, "POST", "/v1/embeddings", BODY)
        wait_until(lambda: metric(server, "shoal_requests_in_flight") == 1, server.process, server.log)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "finishing requests" in server.log.read_text(), server.process, server.log)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises((OSError, HTTPException)):
            pending.result()
    assert server.exit_code() == 128 + signal.SIGTERM
    end = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_limit_holds_over_all_fronts(shoal_server: ShoalServer) -> None:
    """With room for four items, at most as many requests of both fronts together wait; all others are a 429."""
    server = shoal_server(["fake:delay_ms=2000:max_batch_size=1"], *WORKERS, "--max-queue-items", "4")
    with ThreadPoolExecutor(16) as pool:
        pending = [pool.submit(server.request, "POST", "/v1/embeddings", {**BODY, "input": str(n)}) for n in range(16)]
        statuses = [each.result()[0] for each in pending]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 6  # the queue and what has left it for the model


def test_a_client_that_leaves_cancels_its_work(shoal_server: ShoalServer) -> None:
    """The model process stops a task and a stream whose client has closed its connection to a front."""
    server = shoal_server(["fake:delay_ms=60000:token_ms=500"], *WORKERS)
    for path, body in (("/v1/embeddings", BODY), ("/v1/chat/completions", {**CHAT, "stream": True})):
        with connect_to_each(server) as both:
            for connection in both.values():
                connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
                wait_until(lambda: metric(server, "shoal_requests_in_flight") == 1, server.process, server.log)
                connection.close()
                wait_until(lambda: metric(server, "shoal_requests_in_flight") == 0, server.process, server.log)


def test_keys_are_required_by_all_fronts(shoal_server: ShoalServer) -> None:
    """The keys hold for routes of a front and for those of the model process."""
    server = shoal_server(["fake:"], *WORKERS, env={"SHOAL_API_KEY": "user", "SHOAL_ADMIN_KEY": "boss"})
    for _ in range(3):
        assert server.request("POST", "/v1/embeddings", BODY)[0] == 401
        assert server.request("GET", "/v1/models")[0] == 401
        assert server.request("POST", "/models/unload", {"model": "fake"})[0] == 401
    for key, expected in (("user", 403), ("boss", 200)):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", "/models/unload", json.dumps({"model": "fake"}), headers)
        assert connection.getresponse().status == expected
        connection.close()


def test_a_port_in_use_is_refused(several: Server, processes: Processes) -> None:
    """A second server on the port of the first one fails with the usual message, with and without workers."""
    for flags in ((), WORKERS):
        process, log = processes("-m", "shoal", "serve", "fake:", "--port", str(several.port), *flags)
        assert process.wait(timeout=PATIENCE_S) == 1
        assert f"port {several.port} on 127.0.0.1 is in use" in log.read_text()


@pytest.fixture
def ended(processes: Processes) -> Iterator[Any]:
    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        process, log = processes("-m", "shoal", "serve", *arguments, "--port", "0", env=env)
        return process.wait(timeout=PATIENCE_S / 2), log.read_text()

    yield run


@pytest.mark.parametrize("address", ["fake:nonsense=1", "file:/does/not/exist"])
def test_a_bad_address_ends_the_command(ended: Any, address: str) -> None:
    """The exit code is that of a single process, and so is the error, which is said once."""
    single_code, single_log = ended(address)
    code, log = ended(address, *WORKERS)
    assert code == single_code != 0
    assert "Traceback" not in log
    errors = [line for line in single_log.splitlines() if '"level":"error"' in line]
    assert len([line for line in log.splitlines() if '"level":"error"' in line]) == len(errors)
    assert len(log.splitlines()) == len(single_log.splitlines())


def test_a_long_temporary_folder_is_usable(processes: Processes, tmp_path: Path) -> None:
    """The path of a Unix socket has at most 107 bytes, those of folders may be longer."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    process, log = processes("-m", "shoal", "serve", "fake:", "--port", "0", *WORKERS, env={"TMPDIR": str(folder)})
    wait_until(lambda: "model: fake" in log.read_text(), process, log)
    assert "Traceback" not in log.read_text()


def test_no_file_is_left(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """The folder of the socket is removed at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    server = shoal_server(["fake:"], *WORKERS, env={"TMPDIR": str(folder)})
    assert len(list(folder.iterdir())) == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert list(folder.iterdir()) == []


def test_every_line_of_the_log_is_json(shoal_server: ShoalServer) -> None:
    """All processes write to one log, a line each time, and each request is logged once."""
    server = shoal_server(["fake:"], *WORKERS, "--log-format", "json")
    with ThreadPoolExecutor(8) as pool:
        for path in ("/v1/models/fake", "/nowhere"):
            list(pool.map(lambda _, path=path: server.request("GET", path), range(20)))
        list(pool.map(lambda _: server.request("POST", "/v1/embeddings", BODY), range(20)))
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    paths = [line.get("path") for line in lines]
    assert [paths.count(path) for path in ("/v1/models/fake", "/nowhere", "/v1/embeddings")] == [20, 20, 20]
    ids = [line["request_id"] for line in lines if line.get("path")]
    assert len(set(ids)) == len(ids)


def test_one_worker_is_one_process(shoal_server: ShoalServer) -> None:
    """`--workers 1` starts no other process."""
    server = shoal_server(["fake:"], "--workers", "1")
    assert children(server) == {"models": [], "front": []}
