"""`shoal rank`: in this process with the fake model, and with a small server."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.cli import app
from shoal.types import Image, Item
from tests.unit.cli.servers import Quiet, serve_in_thread
from tests.unit.drawn import file_of

runner = CliRunner()

RED = file_of("red")
TEXTS = ["a red square", "a cat", "two dogs"]


@pytest.fixture(autouse=True)
def red(tmp_path: Path, elsewhere: None) -> None:
    (tmp_path / "red.png").write_bytes(RED)


def right() -> list[dict[str, Any]]:
    """Return the softmax over ten times the cosines, by descending score."""
    items: list[Item] = [*TEXTS, Image(RED)]
    rows = np.stack([compute_vector(tokenize_item(item), 32) for item in items])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows[:-1] @ rows[-1]
    powers = np.exp(10 * cosines)
    scores = powers / powers.sum()
    order = np.argsort(-scores).tolist()
    return [
        {"index": place, "text": TEXTS[place], "cosine": float(cosines[place]), "score": float(scores[place])}
        for place in order
    ]


class Upstream(HTTPServer):
    """Answers with the given JSON, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.status = 200
        self.answer = b""


class _Reply(Quiet):
    server: Upstream

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, self.headers["authorization"], body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    with serve_in_thread(server):
        yield server


class TestHere:
    def test_the_best_comes_first(self) -> None:
        result = runner.invoke(app, ["rank", "red.png", *TEXTS, "--model", "fake:images=1", "--json"])
        assert result.exit_code == 0, result.output
        output = json.loads(result.stdout)
        for got, one in zip(output, right(), strict=True):
            assert (got["index"], got["text"]) == (one["index"], one["text"])
            assert (got["cosine"], got["score"]) == pytest.approx((one["cosine"], one["score"]), abs=1e-5)

    def test_as_a_table(self) -> None:
        """The image may come from a pipe."""
        result = runner.invoke(app, ["rank", "-", *TEXTS, "--model", "fake:images=1"], input=RED)
        assert result.exit_code == 0, result.output
        head, *lines = result.stdout.splitlines()
        assert head.split() == ["SCORE", "COSINE", "TEXT"]
        assert [line.split(None, 2) for line in lines] == [
            [f"{one['score']:.4f}", f"{one['cosine']:.4f}", one["text"]] for one in right()
        ]

    @pytest.mark.parametrize(
        ("words", "code", "line"),
        [
            (["no.png", "a"], 1, "no.png cannot be read: No such file or directory"),
            (["red.png", "a", ""], 2, "text 2 is empty"),
            (["red.png", "a", "--model", "fake:"], 1, "the model 'fake' accepts only text"),
            (["red.png", "a", "--model", "fake:images=1:labels=2"], 1, "none of the served models can embed"),
            (["red.png", "a", "--model", "file:nowhere"], 1, "nowhere: "),
        ],
    )
    def test_unrankable_inputs(self, words: list[str], code: int, line: str) -> None:
        result = runner.invoke(app, ["rank", *words])
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.splitlines()[-1].startswith(f"error: {line}")

    def test_an_image_without_texts(self) -> None:
        result = runner.invoke(app, ["rank", "red.png"])
        assert result.exit_code == 2
        assert "Missing argument 'TEXT'" in result.stderr


class TestThere:
    @pytest.mark.parametrize(("model", "named"), [([], {}), (["--model", "m"], {"model": "m"})])
    def test_a_server_answers(self, upstream: Upstream, model: list[str], named: dict[str, str]) -> None:
        """The file itself is sent, and the answer is sorted."""
        rows = [
            {"index": place, "text": text, "cosine": 0.5, "score": score}
            for place, (text, score) in enumerate(zip(TEXTS, (0.25, 0.5, 0.25), strict=True))
        ]
        upstream.answer = json.dumps({"results": rows}).encode()
        place = f"http://127.0.0.1:{upstream.server_port}/"
        words = ["rank", "red.png", *TEXTS, "--url", place, "--json", *model]
        result = runner.invoke(app, words, env={"SHOAL_API_KEY": "k1 bulk"})
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == [rows[1], rows[0], rows[2]]
        ((path, key, body),) = upstream.requests
        assert (path, key) == ("/rank", "Bearer k1")
        head, _, data = body.pop("image").partition(",")
        assert head == "data:application/octet-stream;base64"
        assert b64decode(data, validate=True) == RED
        assert body == {"texts": TEXTS, **named}

    @pytest.mark.parametrize(
        ("status", "answer", "line"),
        [
            (400, b'{"error": {"message": "the image cannot be read: no"}}', "400: red.png: the image cannot be"),
            (404, b'{"detail": "Not Found"}', "answered 404: Not Found"),
            (502, b"<h1>bad</h1>", "answered 502: <h1>bad</h1>"),
            (502, b'["bad"]', 'answered 502: ["bad"]'),
            (200, b'{"results": [{"index": 0}]}', "is it a Shoal server?"),
            (200, b'{"results": null}', "is it a Shoal server?"),
            (200, b"no JSON", "is it a Shoal server?"),
        ],
    )
    def test_other_answers(self, upstream: Upstream, status: int, answer: bytes, line: str) -> None:
        upstream.status, upstream.answer = status, answer
        place = f"http://127.0.0.1:{upstream.server_port}"
        result = runner.invoke(app, ["rank", "red.png", *TEXTS, "--url", place])
        assert (result.exit_code, result.stdout) == (1, "")
        assert line in result.stderr
