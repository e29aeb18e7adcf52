"""The addresses, content and errors of fetches, against local servers."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InvalidValue, Unavailable
from shoal.http.fetching.allowed import FetchPolicy
from shoal.http.fetching.fetcher import Fetcher
from shoal.http.fetching.resolving import SystemResolver
from tests.fakes.certificates import CA, SERVER_CERT, SERVER_KEY
from tests.unit.http.fetching.kit import Names, Web, fetcher, http, raw, soon, url, web

GLOBAL = "93.184.215.14"


class Connections:
    """Replaces sockets and records the addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] = []
        monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", self._start)

    async def _start(self, addr_infos: Sequence[Any], **_: Any) -> socket.socket:
        self.addresses += [info[4][:2] for info in addr_infos]
        raise ConnectionRefusedError("nobody is there")


class TestRequest:
    async def test_request_and_response(self, server: Web) -> None:
        names = Names(["127.0.0.1"])
        got = await fetcher(server, names=names).get(url(server, path="/a%20b.png?k=%2B#f"), deadline=soon())
        assert got == b"picture"
        head = server.requests[0].lower().split("\r\n")
        assert head[0] == "get /a%20b.png?k=%2b http/1.1"
        assert sorted(filter(None, head[1:])) == [
            "accept-encoding: identity",
            "accept: image/*",
            "connection: close",
            f"host: 127.0.0.1:{server.port}",
            "user-agent: shoal",
        ]
        assert names.lookups == []  # an address is not resolved

    async def test_headers_of_the_client(self, server: Web) -> None:
        headers = {"Authorization": "Bearer sk-1", "cookie": "a=1"}
        await fetcher(server).get(url(server), headers, deadline=soon())
        assert "Authorization: Bearer sk-1\r\n" in server.requests[0]
        assert "cookie: a=1\r\n" in server.requests[0]

    async def test_client_headers_are_not_sent_to_public_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is resolved for it."""
        connections, names = Connections(monkeypatch), Names([GLOBAL])
        with pytest.raises(InvalidValue, match="image_download_headers are sent only"):
            await Fetcher(FetchPolicy.parse("public"), resolver=names).get(
                "http://a.example/", {"x-key": "1"}, deadline=soon()
            )
        assert names.lookups == connections.addresses == []

    async def test_headers_that_change_the_request_are_refused(self, server: Web) -> None:
        with pytest.raises(InvalidValue, match="cannot contain Host"):
            await fetcher(server).get(url(server), {"Host": "evil"}, deadline=soon())
        assert server.requests == []

    async def test_cookies_and_connections_are_not_kept(self, server: Web) -> None:
        server.answer = http(headers=["set-cookie: a=1", "connection: keep-alive"])
        web_fetcher = fetcher(server)
        for _ in range(2):
            await web_fetcher.get(url(server, "images.test"), deadline=soon())
        assert len(server.requests) == 2  # this server sends one response per connection
        assert not any("cookie" in each.lower() for each in server.requests)

    async def test_proxies_of_the_environment_are_ignored(self, server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
        async with web() as proxy:
            for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            assert await fetcher(server).get(url(server, "images.test"), deadline=soon()) == b"picture"
            assert proxy.requests == []

    async def test_credentials_are_not_sent(self, server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "netrc").write_text("default login me password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        await fetcher(server).get(url(server), deadline=soon())
        assert "authorization" not in server.requests[0].lower()


class TestAddresses:
    async def test_a_changing_name_is_resolved_once(self, server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
        """Public when checked, inner when resolved again: the connection uses the checked address."""
        connections, names = Connections(monkeypatch), Names([GLOBAL], ["127.0.0.1"])
        web_fetcher = Fetcher(FetchPolicy.parse("public"), resolver=names)
        with pytest.raises(InvalidValue, match=r"rebind\.example cannot be reached"):
            await web_fetcher.get("http://rebind.example/", deadline=soon())
        assert connections.addresses == [(GLOBAL, 80)]
        assert names.lookups == [("rebind.example", 80)]
        with pytest.raises(InvalidValue, match="not on the public internet"):
            await web_fetcher.get("http://rebind.example/", deadline=soon())
        assert connections.addresses == [(GLOBAL, 80)]
        assert len(names.lookups) == 2  # answers are not cached between fetches

    async def test_the_name_goes_to_the_pinned_address(self, server: Web) -> None:
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        assert await fetcher(server, names=names).get(url(server, "images.test"), deadline=soon()) == b"picture"
        assert f"Host: images.test:{server.port}\r\n" in server.requests[0]
        assert len(names.lookups) == 1

    @pytest.mark.parametrize(
        "answer",
        [
            ["127.0.0.1"],
            [GLOBAL, "127.0.0.1"],
            ["10.0.0.1", GLOBAL],
            ["169.254.169.254"],
            ["::1"],
            ["::ffff:127.0.0.1"],
            ["64:ff9b::a9fe:a9fe"],
            ["2002:7f00:1::"],
            ["fe80::1%eth0"],
            [GLOBAL, "fe80::1%eth0"],
            ["100.64.0.1"],
            ["0.0.0.0"],
            ["nonsense"],
        ],
    )
    async def test_every_address_must_be_public(self, answer: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The error does not reveal which one is inner."""
        connections = Connections(monkeypatch)
        with pytest.raises(InvalidValue, match=r"a\.example is not on the public internet") as caught:
            await Fetcher(FetchPolicy.parse("public"), resolver=Names(answer)).get("http://a.example/", deadline=soon())
        assert connections.addresses == []
        assert not any(each in caught.value.message for each in answer)

    async def test_a_listed_name_does_not_lead_to_metadata(self, monkeypatch: pytest.MonkeyPatch) -> None:
        connections = Connections(monkeypatch)
        web_fetcher = Fetcher(FetchPolicy.parse("a.example"), resolver=Names(["169.254.169.254"], ["10.0.0.7"]))
        with pytest.raises(InvalidValue, match="not on the public internet"):
            await web_fetcher.get("http://a.example/", deadline=soon())
        with pytest.raises(InvalidValue, match="cannot be reached"):
            await web_fetcher.get("http://a.example/", deadline=soon())
        assert connections.addresses == [("10.0.0.7", 80)]

    async def test_a_name_in_another_case_or_script(self, server: Web) -> None:
        """It is compared, resolved and sent in one form."""
        names = Names(["127.0.0.1"])
        web_fetcher = Fetcher(FetchPolicy.parse(f"Bücher.test:{server.port}"), resolver=names)
        assert await web_fetcher.get(url(server, "BÜCHER.test"), deadline=soon()) == b"picture"
        assert names.lookups == [("xn--bcher-kva.test", server.port)]
        assert f"Host: xn--bcher-kva.test:{server.port}\r\n" in server.requests[0]

    async def test_all_addresses_are_tried(self, server: Web) -> None:
        """The first address refuses the connection."""
        names = Names(["127.0.0.9", "127.0.0.1"])
        assert await fetcher(server, names=names).get(url(server, "images.test"), deadline=soon()) == b"picture"

    @pytest.mark.parametrize("refused", ["http://127.0.0.1/", "http://127.1/", "http://a@b.example/", "file:///x", "x"])
    async def test_a_refused_url_is_not_resolved(self, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
        connections, names = Connections(monkeypatch), Names([GLOBAL])
        with pytest.raises(InvalidValue):
            await Fetcher(FetchPolicy.parse("public"), resolver=names).get(refused, deadline=soon())
        assert names.lookups == connections.addresses == []

    async def test_a_name_without_addresses(self, server: Web) -> None:
        """The resolver's error is not shown."""
        with pytest.raises(InvalidValue, match=r"images\.test cannot be resolved: check") as caught:
            await fetcher(server, names=Names([])).get(url(server, "images.test"), deadline=soon())
        assert "10.9.8.7" not in caught.value.message


class TestSystemResolver:
    async def test_this_machine(self) -> None:
        names = SystemResolver(1)
        assert "127.0.0.1" in await names.addresses("localhost", 80)
        await names.aclose()

    async def test_through_a_fetch(self, server: Web) -> None:
        web_fetcher = Fetcher(FetchPolicy.parse(f"localhost:{server.port}"))
        assert await web_fetcher.get(url(server, "localhost"), deadline=soon()) == b"picture"
        await web_fetcher.aclose()
        with pytest.raises(Unavailable, match="shutting down"):
            await web_fetcher.get(url(server, "localhost"), deadline=soon())

    async def test_a_name_of_this_machine_is_not_public(self) -> None:
        web_fetcher = Fetcher(FetchPolicy.parse("public"), slots=1)
        with pytest.raises(InvalidValue, match="localhost is not on the public internet"):
            await web_fetcher.get("http://localhost/", deadline=soon())
        await web_fetcher.aclose()

    async def test_the_fetcher_closes_its_resolver(self) -> None:
        names = Names([GLOBAL])
        await Fetcher(FetchPolicy.parse("public"), resolver=names).aclose()
        assert names.closed


class TestTls:
    @staticmethod
    def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts of a server at localhost and 127.0.0.1, and of a client that trusts its CA."""
        (folder / "cert").write_bytes(SERVER_CERT)
        (folder / "key").write_bytes(SERVER_KEY)
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(folder / "cert", folder / "key")
        return serving, ssl.create_default_context(cadata=CA.decode())

    async def test_the_name_of_the_url_is_sent_and_verified(self, tmp_path: Path) -> None:
        serving, knowing = self.contexts(tmp_path)
        async with web(tls=serving) as server:
            allowed = FetchPolicy.parse(f"localhost:{server.port},images.test:{server.port}")
            web_fetcher = Fetcher(allowed, resolver=Names(["127.0.0.1"]), tls=knowing)
            assert await web_fetcher.get(f"https://localhost:{server.port}/", deadline=soon()) == b"picture"
            with pytest.raises(InvalidValue, match=r"images\.test has no trusted certificate for this name") as caught:
                await web_fetcher.get(f"https://images.test:{server.port}/", deadline=soon())
            assert "127.0.0.1" not in caught.value.message
            assert server.names == ["localhost", "images.test"]
            assert len(server.requests) == 1

    async def test_an_unknown_ca_is_refused(self, tmp_path: Path) -> None:
        """Only the system's certificates count."""
        serving, _ = self.contexts(tmp_path)
        async with web(tls=serving) as server:
            web_fetcher = Fetcher(FetchPolicy.parse(f"localhost:{server.port}"), resolver=Names(["127.0.0.1"]))
            with pytest.raises(InvalidValue, match="certificate"):
                await web_fetcher.get(f"https://localhost:{server.port}/", deadline=soon())
            assert server.requests == []

    async def test_a_server_without_tls(self) -> None:
        async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(InvalidValue, match="certificate"):
                await Fetcher(FetchPolicy.parse(f"127.0.0.1:{port}")).get(f"https://127.0.0.1:{port}/", deadline=soon())


class TestAnswers:
    @pytest.mark.parametrize(
        ("location", "named"),
        [
            ("http://10.0.0.1/secret", "another location"),
            ("http://169.254.169.254/latest/meta-data/", "another location"),
            ("http://[::1]:9/", "another location"),
            ("file:///etc/passwd", "another location"),
            ("", "another location"),
            ("http://[", "another location"),
            ("https://cdn.example/x.png?key=secret", "https://cdn.example/x.png"),
            ("https://me:secret@cdn.example/x.png", "https://cdn.example/x.png"),
        ],
    )
    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304, 300])
    async def test_redirects_are_not_followed(self, server: Web, status: int, location: str, named: str) -> None:
        server.answer = http(b"", status=f"{status} Elsewhere", headers=[f"location: {location}"])
        with pytest.raises(InvalidValue, match=r"redirects are not followed: send the URL") as caught:
            await fetcher(server).get(url(server), deadline=soon())
        assert f"redirects to {named}," in caught.value.message
        assert "secret" not in caught.value.message
        assert len(server.requests) == 1

    async def test_a_redirect_to_itself_is_not_followed(self, server: Web) -> None:
        server.answer = http(b"", status="302 Found", headers=["location: /y.png"])
        with pytest.raises(InvalidValue, match=r"redirects to http://127\.0\.0\.1:\d+/y\.png,"):
            await fetcher(server).get(url(server), deadline=soon())
        assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("status", "step"), [(404, "check the URL"), (403, "check the URL"), (503, "again"), (204, "URL"), (206, "URL")]
    )
    async def test_other_statuses(self, server: Web, status: int, step: str) -> None:
        """The body is not shown: it may come from an inner host."""
        server.answer = http(b"" if status == 204 else b"secret", status=f"{status} Words")
        with pytest.raises(InvalidValue, match=f"returned status {status} instead of an image: .*{step}") as caught:
            await fetcher(server).get(url(server), deadline=soon())
        assert "secret" not in caught.value.message
        assert "Words" not in caught.value.message

    @pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate", "zstd", "identity, gzip", "x"])
    async def test_compressed_answers(self, server: Web, encoding: str) -> None:
        """Nothing is decompressed, whatever its size."""
        server.answer = http(gzip.compress(bytes(2**22)), headers=[f"content-encoding: {encoding}"])
        with pytest.raises(InvalidValue, match="compressed its response"):
            await fetcher(server, max_bytes=2**20).get(url(server), deadline=soon())

    async def test_identity_encoding_is_accepted(self, server: Web) -> None:
        server.answer = http(headers=["content-encoding: Identity"])
        assert await fetcher(server).get(url(server), deadline=soon()) == b"picture"

    async def test_undeclared_gzip_stays_unchanged(self, server: Web) -> None:
        bomb = gzip.compress(bytes(2**22))
        server.answer = http(bomb, headers=["content-type: application/gzip"])
        assert await fetcher(server).get(url(server), deadline=soon()) == bomb

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npict", "too early"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npict\r\n", "too early"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\npict\r\n", "too early|closed"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\npict", "does not speak HTTP"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1e3\r\n\r\npict", "does not speak HTTP"),
            (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 20_000 + b"\r\n\r\n", "does not speak HTTP"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "returned an empty response"),
            (b"SSH-2.0-OpenSSH_9.0\r\n", "does not speak HTTP"),
            (b"+OK\r\n", "does not speak HTTP"),
            (b"", "closed the connection"),
        ],
    )
    async def test_broken_answers(self, server: Web, data: bytes, why: str) -> None:
        server.answer = raw(data)
        with pytest.raises(InvalidValue, match=why) as caught:
            await fetcher(server).get(url(server), deadline=soon())
        assert "OpenSSH" not in caught.value.message

    async def test_more_than_the_stated_length(self, server: Web) -> None:
        """The connection is closed after the body, so additional bytes violate the protocol."""
        server.answer = http(b"picture and more", length=7, headers=["connection: close"])
        with pytest.raises(InvalidValue, match="does not speak HTTP"):
            await fetcher(server).get(url(server), deadline=soon())

    async def test_a_body_without_a_length(self, server: Web) -> None:
        server.answer = raw(b"HTTP/1.0 200 OK\r\n\r\npicture")
        assert await fetcher(server).get(url(server), deadline=soon()) == b"picture"

    async def test_connection_refused(self, server: Web) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            web_fetcher = Fetcher(FetchPolicy.parse(f"images.test:{port}"), resolver=Names(["127.0.0.1"]))
            with pytest.raises(InvalidValue, match=r"images\.test cannot be reached") as caught:
                await web_fetcher.get(f"http://images.test:{port}/", deadline=soon())
        assert "127.0.0.1" not in caught.value.message

    async def test_nothing_is_logged(self, server: Web, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        server.answer = http(b"secret", status="500 Oops")
        with pytest.raises(InvalidValue):
            await fetcher(server).get(url(server, path="/?key=secret"), {"x-key": "secret"}, deadline=soon())
        assert "secret" not in caplog.text


class TestSize:
    @pytest.mark.parametrize("size", [999, 1000])
    async def test_up_to_the_limit(self, server: Web, size: int) -> None:
        server.answer = http(bytes(size))
        assert await fetcher(server, max_bytes=1000).get(url(server), deadline=soon()) == bytes(size)

    async def test_a_too_large_declared_length_is_refused(self, server: Web) -> None:
        """It is refused before the body arrives."""
        server.answer = http(b"", length=10**12)
        with pytest.raises(InvalidValue, match=r"sends more than the limit of 20 MiB for an image: use a smaller"):
            await fetcher(server).get(url(server), deadline=soon())

    @pytest.mark.parametrize("framing", ["chunked", "none"])
    async def test_an_endless_stream_is_cut_off(self, server: Web, framing: str) -> None:
        """The connection is closed once the body is too large, and later bytes are not read."""
        sent = 0

        async def endless(writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            chunked = framing == "chunked"
            writer.write(b"HTTP/1.1 200 OK\r\n" + (b"transfer-encoding: chunked\r\n\r\n" if chunked else b"\r\n"))
            piece = b"10000\r\n" + bytes(2**16) + b"\r\n" if chunked else bytes(2**16)
            while True:
                writer.write(piece)
                sent += 2**16
                await writer.drain()

        server.answer = endless
        with pytest.raises(InvalidValue, match="more than the limit of 1 MiB"):
            await fetcher(server, max_bytes=2**20).get(url(server), deadline=soon())
        await server.until(lambda: server.busy == 0)
        assert sent < 2**25  # the system controls the socket buffers
