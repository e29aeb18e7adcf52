"""Images over HTTP, in a server of its own: hostile ones use no memory and reach no other host."""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.server_kit import Server, ShoalServer
from tests.unit.http.fetching.test_allowed import REFUSED
from tests.unit.models.tower_checkpoints import towers
from tests.unit.pipelines.image.image_kit import bombs, broken, drawn, image_files, saved

MOST_GROWTH = 96 * 2**20
"""The largest body takes 28 MB as text and 21 MB decoded, and the C library keeps some; a bomb would take hundreds."""


class Host(BaseHTTPRequestHandler):
    """Serves one image, an endless stream, and redirects."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/picture.png":
            data = saved(drawn(60, 40), "PNG")
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        elif self.path == "/endless":
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            piece = b"10000\r\n" + bytes(0x10000) + b"\r\n"
            try:
                for _ in range(1600):
                    self.wfile.write(piece)
            except OSError:
                self.close_connection = True
        else:
            self.send_response(302)
            self.send_header("location", "/picture.png")
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[ThreadingHTTPServer]]:
    """Two hosts on loopback: the first is on the allowlist, the second is not."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Host) for _ in range(2)]
    for one in servers:
        one.paths = []  # type: ignore[attr-defined]
        threading.Thread(target=one.serve_forever, daemon=True).start()
    yield servers
    for one in servers:
        one.shutdown()
        one.server_close()


@pytest.fixture
def server(tmp_path: Path, shoal_server: ShoalServer, hosts: list[ThreadingHTTPServer]) -> Server:
    (tmp_path / "clip").mkdir()
    folder = towers(tmp_path / "clip")
    listed = f"127.0.0.1:{hosts[0].server_port},public"
    limits = ("--image-hosts", listed, "--max-body-bytes", "33554432")  # room for a file above `image_max_mb`
    return shoal_server([f"clip=file:{folder}"], "--home", str(tmp_path / "home"), *limits)


def embedded(server: Server, *inputs: dict[str, str] | str) -> tuple[int, dict[str, Any]]:
    status, _, body = server.request("POST", "/v1/embeddings", {"model": "clip", "input": list(inputs)})
    return status, json.loads(body)


def rows(body: dict[str, Any]) -> list[list[float]]:
    return [row["embedding"] for row in body["data"]]


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def kilobytes(server: Server, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text(), re.M)
    assert match
    return int(match[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_images_cost_no_memory_and_contact_no_host(server: Server, hosts: list[ThreadingHTTPServer]) -> None:
    """Each file and address of the tables, an endless stream and a redirect are rejected; the server's memory does not
    grow."""
    good = encoded(image_files()["odd"])
    listed, other = (f"http://127.0.0.1:{host.server_port}" for host in hosts)
    for _ in range(3):  # memory loaded at the first request is not growth
        status, before = embedded(server, {"image": good}, "a text", {"image": f"{listed}/picture.png"})
        assert status == 200, before
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # reset the peak
    rested = kilobytes(server, "VmRSS")
    hostile = {name: encoded(data) for name, data in (bombs() | broken()).items()}
    hostile |= {
        "too many bytes": encoded(saved(drawn(40, 30), "PNG") + bytes(21_000_000)),
        "many bytes and no picture": "data:image/png;base64," + encoded(b"\x89PNG" + bytes(10_000_000)),
    }
    hostile |= {url: url for url in REFUSED} | {other: f"{other}/picture.png"}
    hostile |= {"endless": f"{listed}/endless", "redirect": f"{listed}/elsewhere"}
    for name, text in hostile.items():
        status, body = embedded(server, {"image": text})
        assert status == 400, (name, status, body)
        assert str(body["error"]["message"]), name
        grown = (kilobytes(server, "VmHWM") - rested) * 1024
        assert grown <= MOST_GROWTH, (name, grown)
    assert not hosts[1].paths  # type: ignore[attr-defined]
    status, after = embedded(server, {"image": good}, "a text", {"image": f"{listed}/picture.png"})
    assert status == 200
    assert np.allclose(rows(before), rows(after), atol=1e-6)
    assert "Traceback" not in server.log.read_text()
