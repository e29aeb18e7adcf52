"""`shoal serve` as a process: start, signals, and start errors."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.integration.llm_kit import metric
from tests.integration.server_kit import Processes, Server, ShoalServer, wait_until

BODY = {"model": "fake", "input": "Hello"}
Reply: TypeAlias = tuple[int, dict[str, str], bytes]


def in_flight(server: Server, pool: ThreadPoolExecutor) -> Future[Reply]:
    """Yield during a request that the server has begun to answer; its model must be slow."""
    future = pool.submit(server.request, "POST", "/v1/embeddings", BODY)
    wait_until(lambda: metric(server, "shoal_requests_in_flight") == 1, server.process, server.log)
    return future


def embedding(reply: Reply) -> list[float]:
    status, _, body = reply
    assert status == 200, body
    vector: Any = json.loads(body)["data"][0]["embedding"]
    assert vector
    return list(vector)


def test_a_request_in_flight_survives_sigterm(shoal_server: ShoalServer) -> None:
    """SIGTERM: the request is answered, new ones are rejected, the exit code is 0."""
    server = shoal_server(["fake:delay_ms=5000"])
    with ThreadPoolExecutor() as pool:
        pending = in_flight(server, pool)
        server.process.send_signal(signal.SIGTERM)
        wait_until(server.refuses, server.process, server.log)
        embedding(pending.result())
    assert server.exit_code() == 0
    assert "Traceback" not in server.log.read_text()


def test_ctrl_c_is_a_clean_stop(shoal_server: ShoalServer) -> None:
    """SIGINT acts like SIGTERM: exit code 0, no traceback."""
    server = shoal_server(["fake:"])
    server.process.send_signal(signal.SIGINT)
    assert server.exit_code() == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(shoal_server: ShoalServer, number: signal.Signals) -> None:
    """A long request does not delay the exit."""
    server = shoal_server(["fake:delay_ms=600000"])
    with ThreadPoolExecutor() as pool:
        pending = in_flight(server, pool)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.ready(), server.process, server.log)
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert server.exit_code() == 128 + number
        with pytest.raises(OSError):
            pending.result()


def test_the_drain_is_bounded(shoal_server: ShoalServer) -> None:
    """After drain_timeout_s the remaining requests are dropped, and the process exits by itself."""
    server = shoal_server(["fake:delay_ms=600000"], "--drain-timeout-s", "1")
    with ThreadPoolExecutor() as pool:
        pending = in_flight(server, pool)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert pending.result()[0] == 503
    assert "Traceback" not in server.log.read_text()


def test_readiness_goes_first(shoal_server: ShoalServer) -> None:
    """For drain_delay_s the server reports that it is not ready, and still answers; liveness stays."""
    server = shoal_server(["fake:"], "--drain-delay-s", "1.5")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not server.ready(), server.process, server.log)
    assert server.request("GET", "/health/ready")[0] == 503
    assert server.request("GET", "/health/live")[0] == 200
    reply = server.request("POST", "/v1/embeddings", BODY)
    embedding(reply)
    assert reply[1]["connection"] == "close"
    assert server.exit_code() == 0


def test_a_port_in_use_is_found_before_models_load(processes: Processes) -> None:
    """One line names the port and the next step; exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        process, log = processes("-m", "shoal", "serve", "fake:", "--port", str(port))
        assert process.wait(30) == 1
    assert log.read_text().startswith(f"error: port {port} on 127.0.0.1 is in use: choose another with --port")
    assert len(log.read_text().splitlines()) == 1


def test_a_wrong_address_is_found_before_the_port_is_taken(processes: Processes) -> None:
    """One line with the address parser's own message, although the port is in use too; exit code 2."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        process, log = processes("-m", "shoal", "serve", "fake:", "pip:foo", "--port", str(holder.getsockname()[1]))
        assert process.wait(30) == 2
    (line,) = log.read_text().splitlines()
    assert line.startswith("error: pip:foo: 'pip' is not a known scheme")


def test_an_open_address_without_keys_is_refused(processes: Processes) -> None:
    """The line names both solutions; exit code 1."""
    process, log = processes("-m", "shoal", "serve", "fake:", "--host", "0.0.0.0", "--port", "0")
    assert process.wait(30) == 1
    assert "--api-key-file" in log.read_text()
    assert "--insecure" in log.read_text()


def test_the_only_model_failing_ends_the_server(processes: Processes, tmp_path: Path) -> None:
    """Without any model to serve, the model's error is the last log record, and the exit code is 1."""
    process, log = processes("-m", "shoal", "serve", f"file:{tmp_path}/nowhere", "--port", "0")
    assert process.wait(30) == 1
    assert "Traceback" not in log.read_text()
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["level"], last["message"].startswith("nowhere: ")) == ("error", True)


def test_the_banner_is_logged_where_there_is_no_terminal(shoal_server: ShoalServer) -> None:
    """The log has the address, facts and a line to copy; standard output stays empty."""
    server = shoal_server(["fake:"])
    wait_until(lambda: "curl -s" in server.log.read_text(), server.process, server.log)
    records = [json.loads(line) for line in server.log.read_text().splitlines()]
    messages = [record["message"] for record in records]
    assert f"docs: {server.base_url}/docs" in messages
    assert "auth: off, only this machine can connect" in messages


def test_an_offer_of_http2_costs_no_body(shoal_server: ShoalServer) -> None:
    """Java's HttpClient and `curl --http2` offer HTTP/2 on every plain-HTTP POST; the connection continues with
    HTTP/1.1."""
    server = shoal_server(["fake:"])
    body = json.dumps(BODY).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + offer + b"\r\n" + body[:5])
        time.sleep(0.1)
        connection.sendall(body[5:] + head + b"\r\n" + body)
        with connection.makefile("rb") as stream:
            for _ in range(2):
                lines = [*iter(stream.readline, b"\r\n")]
                assert lines[0].startswith(b"HTTP/1.1 200"), lines
                length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length"))
                embedding((200, {}, stream.read(length)))


def test_any_asgi_server_can_run_it(processes: Processes) -> None:
    """`uvicorn shoal.asgi:app` reads SHOAL_ variables, becomes ready, answers, and exits cleanly."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    arguments = ("-m", "uvicorn", "shoal.asgi:app", "--port", str(port))
    process, log = processes(*arguments, env={"SHOAL_MODELS": "fake:"})
    server = Server(process, port, log)
    wait_until(server.ready, process, log)
    embedding(server.request("POST", "/v1/embeddings", BODY))
    process.send_signal(signal.SIGTERM)
    # uvicorn exits by the signal that it received
    assert server.exit_code() in (0, -signal.SIGTERM)
    assert "Traceback" not in log.read_text()


def test_a_wrong_setting_stops_any_asgi_server(processes: Processes) -> None:
    """The lifespan fails with the setting's own message."""
    process, log = processes("-m", "uvicorn", "shoal.asgi:app", "--port", "0", env={"SHOAL_PORT": "eighty"})
    assert process.wait(30) != 0
    assert "SHOAL_PORT: must be a whole number" in log.read_text()
    assert "Traceback" not in log.read_text()
