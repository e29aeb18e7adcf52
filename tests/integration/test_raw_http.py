"""Requests that no client library sends, over a socket to a running server."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.server_kit import Server, ShoalServer

BODY = b'{"model":"fake","input":"a"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nContent-Type: application/json\r\n"
CONTENT = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
HOST = b"Host: localhost\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
KEY = b"Authorization: Bearer sesame\r\n"


@pytest.fixture
def server(shoal_server: ShoalServer) -> Server:
    return shoal_server(["fake:"], "--client-header", "x-user")


def exchange(server: Server, *packets: bytes, last: bytes = LAST) -> bytes:
    """Return all bytes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for packet in packets:
            connection.sendall(packet)
            time.sleep(0.02 if len(packets) > 1 else 0)
        connection.sendall(last)
        response = b""
        while piece := connection.recv(65536):
            response += piece
        return response


def statuses(response: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", response)]


def cut(whole: bytes) -> Iterator[bytes]:
    return (whole[at : at + 40] for at in range(0, len(whole), 40))


REFUSED_BY_RULES = {
    "no host": POST + CONTENT,
    "two hosts": POST + HOST + HOST + CONTENT,
    "another host": POST + HOST + b"Host: evil.example\r\n" + CONTENT,
    "two keys": POST + HOST + KEY + KEY + CONTENT,
    "two content types": POST + HOST + b"Content-Type: text/plain\r\n" + CONTENT,
    "two origins": POST + HOST + b"Origin: http://localhost\r\nOrigin: https://evil.example\r\n" + CONTENT,
    "two users": POST + HOST + b"X-User: a\r\nX-User: b\r\n" + CONTENT,
    "two classes": POST + HOST + b"X-Shoal-Class: bulk\r\nX-Shoal-Class: interactive\r\n" + CONTENT,
    "junk behind the port": POST + b"Host: 127.0.0.1:80@evil.com\r\n" + CONTENT,
    "junk behind the address": POST + b"Host: [::1]evil.com\r\n" + CONTENT,
    "a host in the target alone": POST.replace(b"/v1", b"http://localhost/v1") + CONTENT,
    "another host in the target": POST.replace(b"/v1", b"http://evil.example/v1") + HOST + CONTENT,
    "a coding that is not decoded": POST + HOST + CHUNKS.replace(b"chunked", b"gzip, chunked") + b"\r\n",
}
REFUSED_BY_THE_PARSER = {
    "both lengths": POST + HOST + b"Content-Length: 3\r\n" + CHUNKS + b"\r\n",
    "two lengths": POST + HOST + b"Content-Length: 3\r\n" + CONTENT,
    "a signed length": POST + HOST + CONTENT.replace(b"Length: ", b"Length: +"),
    "two codings": POST + HOST + b"Transfer-Encoding: chunked\r\n" + CHUNKS + b"\r\n",
    "an unknown coding": POST + HOST + CHUNKS.replace(b"chunked", b"xchunked") + b"\r\n",
    "a folded header": POST + HOST + b"X: a\r\n b\r\n" + CONTENT,
    "a blank before the colon": POST + b"Host : localhost\r\n" + CONTENT,
    "a blank before the first name": POST.replace(b"\r\nContent", b"\r\n Content") + HOST + CONTENT,
    "a NUL": POST + b"Host: local\x00host\r\n" + CONTENT,
    "a bare LF": POST + HOST.replace(b"\r\n", b"\n") + CONTENT,
    "a bare CR": POST + HOST + b"X: a\rb: c\r\n" + CONTENT,
    "a chunk size in other words": POST + HOST + CHUNKS.replace(b"\r\n\r\n", b"\r\n\r\n0x") + b"\r\n",
    "a bare LF behind a chunk": POST + HOST + CHUNKS.replace(b"}\r\n", b"}\n") + b"\r\n",
    "a length among the trailers": POST + HOST + CHUNKS + b"Content-Length: 3\r\n\r\n",
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
}


@pytest.mark.parametrize("pipelined", [False, True])
def test_ambiguous_requests_are_rejected(server: Server, pipelined: bool) -> None:
    """400 in JSON with a reason, also behind another request of the same connection. Broken framing ends the
    connection, a parser error drops everything after it; other rejections leave the next request alone."""
    ahead = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" if pipelined else b""
    for group, after in ((REFUSED_BY_RULES, [200]), (REFUSED_BY_THE_PARSER, [])):
        for name, sent in group.items():
            ends = b"gzip" in sent
            response = exchange(server, ahead + sent, last=b"" if ends else LAST)
            assert statuses(response) == [200] * pipelined + [400] + ([] if ends else after), (name, response)
            answer = response.split(b"HTTP/1.1 400")[1].split(b"\r\n\r\n", 1)[1]
            assert json.JSONDecoder().raw_decode(answer.decode("latin-1"))[0]["error"]["message"], name


def test_other_versions(server: Server) -> None:
    for sent, version in (b"GET /v1/models\r\n\r\n", b"0.9"), (POST.replace(b"1.1", b"2.0") + HOST + CONTENT, b"2.0"):
        response = exchange(server, sent, last=b"")  # the response ends the connection
        assert statuses(response) == [400]
        assert b"HTTP/%s is not supported" % version in response


@pytest.mark.parametrize("pipelined", [1, 3])
def test_trailers_change_nothing(server: Server, pipelined: bool) -> None:
    """Trailers change neither authorization, nor the client's identity, nor the body; in one packet or in many."""
    trailers = (
        b"Host: localhost\r\nX-User: eve\r\nContent-Type: text/plain\r\nX-Shoal-Class: bulk\r\nX-Request-Id: eve\r\n"
    )
    sent = (POST + HOST + b"X-User: anna\r\nX-Request-Id: anna\r\n" + CHUNKS + trailers + b"\r\n") * pipelined
    for packets in ([sent], list(cut(sent))):
        response = exchange(server, *packets)
        assert statuses(response) == [200] * (pipelined + 1)
        assert response.count(b"x-request-id: anna\r\n") == pipelined
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {line["client"] for line in lines if line.get("path") == "/v1/embeddings"} == {"anna"}


def test_trailers_open_nothing(server: Server) -> None:
    """A page that rebound its DNS name cannot send another Host behind its body."""
    response = exchange(server, POST + b"Host: evil.example\r\n" + CHUNKS + HOST + b"\r\n", last=b"")
    assert statuses(response)[0] == 403
