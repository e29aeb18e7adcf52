"""`shoal embed`: in this process with the fake model, and with a small server."""

from __future__ import annotations

import io
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.backends.fake.model import compute_vector, tokenize_item, word_id
from shoal.cli import app
from shoal.types import Image
from tests.unit.cli.servers import Quiet, serve_in_thread
from tests.unit.drawn import file_of

runner = CliRunner()

URI = "data:application/octet-stream;base64,"
BROKEN = b"\x89PNG\r\n\x1a\n and no more"


def expected(*words: str, dimension: int = 32) -> Any:
    vector = compute_vector([word_id(word) for word in words], dimension)
    return vector / np.linalg.norm(vector)


class Upstream(HTTPServer):
    """Answers every text with its length, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["first", "second"]


def _length(item: Any) -> int:
    """Return the length of a text, plain or in an object; of an image the number of bytes."""
    if isinstance(item, str):
        return len(item)
    ((kind, value),) = item.items()
    return len(value) if kind == "text" else len(b64decode(value.removeprefix(URI), validate=True))


class _Reply(Quiet):
    server: Upstream

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        listed = self.path == "/v1/models"
        self.send_response(200 if listed else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["authorization"])
        refused = body.get("model") == "nobody"
        broken = [
            place for place, item in enumerate(body["input"]) if item == {"image": URI + b64encode(BROKEN).decode()}
        ]
        if broken:
            self.send_response(400)
            self.end_headers()
            named = f"input {broken[0]}: " if len(body["input"]) > 1 else ""
            self.wfile.write(json.dumps({"detail": f"{named}the image cannot be read: no"}).encode())
            return
        vectors = [np.full(3, _length(item), "<f4").tobytes() for item in body["input"]]
        data = [{"index": place, "embedding": b64encode(vector).decode()} for place, vector in enumerate(vectors)]
        answer = {"error": {"message": "no model nobody; known: all"}} if refused else {"data": data}
        self.send_response(404 if refused else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    with serve_in_thread(server):
        yield server


class TestHere:
    def test_arguments_become_rows_of_json(self) -> None:
        """One vector per text, in the same order."""
        result = runner.invoke(app, ["embed", "--model", "fake:", "a b", "c"])
        assert result.exit_code == 0, result.output
        assert np.allclose(json.loads(result.stdout), [expected("a", "b"), expected("c")])

    def test_standard_input_is_one_text_a_line(self, tmp_path: Path) -> None:
        """The vectors are also written to a file in NumPy format."""
        result = runner.invoke(app, ["embed", "--model", "fake:", "-o", "out.npy"], input="a b\nc\n")
        assert (result.exit_code, result.stdout) == (0, "")
        rows = np.load(tmp_path / "out.npy", allow_pickle=False)
        assert rows.dtype == np.float32
        assert np.allclose(rows, [expected("a", "b"), expected("c")])

    def test_only_line_ends_end_lines(self) -> None:
        """Other line separators are part of a text; CR LF is one end, and the last line needs none."""
        breaks = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e \r x"
        result = runner.invoke(app, ["embed", "--model", "fake:"], input=f"a b\r\n{breaks}\nc".encode())
        assert result.exit_code == 0, result.output
        assert np.allclose(json.loads(result.stdout), [expected("a", "b"), expected(*breaks.split()), expected("c")])

    @pytest.mark.parametrize(
        ("data", "line"),
        [
            (b"a\n\xfcber\n", "line 2 of standard input is not UTF-8 (byte 1 is 0xfc): convert it first"),
            (b"a\n\nb\n", "line 2 of standard input is empty and has no vector: remove it or fill it"),
            (b"a\r\n\r\n", "line 2 of standard input is empty and has no vector"),
        ],
    )
    @pytest.mark.parametrize("there", [[], ["--url", "http://127.0.0.1:1"]])
    def test_lines_without_a_vector_are_reported(self, data: bytes, line: str, there: list[str]) -> None:
        """The error comes before a model is loaded or a server called, and is the same for both."""
        result = runner.invoke(app, ["embed", "--model", "fake:", *there], input=data)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: {line}")

    @pytest.mark.parametrize(("text", "reason"), [("", "is empty and has no vector"), ("\udcfc", "is not UTF-8")])
    def test_arguments_without_a_vector_are_reported(self, text: str, reason: str) -> None:
        """The error has the position and exit code 2. Bytes that are not UTF-8 reach Python as surrogates."""
        result = runner.invoke(app, ["embed", "--model", "fake:", "a", text])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: text 2 {reason}")

    def test_more_texts_than_a_chunk_keep_their_order(self) -> None:
        """The rows of several requests are joined in order."""
        words = [f"w{number}" for number in range(1100)]
        result = runner.invoke(app, ["embed", "--model", "fake:"], input="\n".join(words))
        assert np.allclose(json.loads(result.stdout), [expected(word) for word in words])

    def test_fields_of_the_request_are_passed_on(self, tmp_path: Path) -> None:
        """`--dimensions` truncates; .json files contain what the terminal would show."""
        result = runner.invoke(app, ["embed", "--model", "fake:", "a", "--dimensions", "4", "-o", "out.json"])
        assert result.exit_code == 0, result.output
        assert len(json.loads((tmp_path / "out.json").read_text())[0]) == 4

    def test_a_model_that_cannot_load_is_one_line(self, tmp_path: Path) -> None:
        """The model's error is printed, with exit code 1."""
        result = runner.invoke(app, ["embed", "--model", f"file:{tmp_path}/nowhere", "a"])
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: nowhere: ")

    def test_a_wrong_address_is_a_usage_error(self) -> None:
        """The address parser's error is printed, with exit code 2."""
        result = runner.invoke(app, ["embed", "--model", "hff:a/b", "a"])
        assert result.exit_code == 2
        assert "did you mean hf:?" in result.stderr

    def test_servers_without_a_name(self) -> None:
        """The error comes before anything is loaded, with the correct form."""
        result = runner.invoke(app, ["embed", "--model", "tei+http://a:80,tei+http://b:80", "a"])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: tei+http://a:80,tei+http://b:80: name the model on these servers: ")
        assert "NAME=tei+http://a:80,..." in result.stderr

    def test_empty_input_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Empty input is an error; the command does not wait silently for a terminal."""
        assert "standard input is empty" in runner.invoke(app, ["embed", "--model", "fake:"], input="").stderr

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        from shoal.cli.embed import _read_lines
        from shoal.errors import ConfigError

        monkeypatch.setattr("sys.stdin", Terminal())
        with pytest.raises(ConfigError, match="pipe them in"):
            _read_lines()

    def test_only_known_kinds_of_files(self) -> None:
        """The error comes before any work."""
        result = runner.invoke(app, ["embed", "a", "-o", "out.csv"])
        assert result.exit_code == 2
        assert "name a .npy or a .json file" in result.stderr

    def test_a_file_that_cannot_be_written(self) -> None:
        """The error is one line with the reason."""
        result = runner.invoke(app, ["embed", "--model", "fake:", "a", "-o", "no/such/folder.npy"])
        assert result.exit_code == 1
        assert "cannot be written: No such file or directory" in result.stderr


class TestThere:
    def test_a_server_answers(self, upstream: Upstream) -> None:
        """Requests carry the configured key, in chunks, with base64 floats."""
        place = f"http://127.0.0.1:{upstream.server_port}/"
        texts = ["x" * (1 + number % 7) for number in range(700)]
        arguments = ["embed", "--url", place, "--model", "m", "--input-type", "query"]
        result = runner.invoke(app, arguments, input="\n".join(texts), env={"SHOAL_API_KEY": "k1,k2"})
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == [[len(text)] * 3 for text in texts]
        assert upstream.keys == ["Bearer k1"] * 2
        assert [len(body["input"]) for body in upstream.requests] == [512, 188]
        assert upstream.requests[0]["model"] == "m"
        assert upstream.requests[0]["input_type"] == "query"
        assert "dimensions" not in upstream.requests[0]

    def test_without_a_model_the_first_one_is_used(self, upstream: Upstream) -> None:
        """The server's list decides; every request carries the bare key, without its class."""
        place = f"http://127.0.0.1:{upstream.server_port}"
        result = runner.invoke(app, ["embed", "--url", place, "ab"], env={"SHOAL_API_KEY": "k1 bulk"})
        assert result.exit_code == 0, result.output
        assert [body["model"] for body in upstream.requests] == ["first"]
        assert upstream.keys == ["Bearer k1"] * 2

    def test_a_server_without_models(self, upstream: Upstream) -> None:
        """One line names the flag; exit code 1."""
        upstream.models.clear()
        result = runner.invoke(app, ["embed", "--url", f"http://127.0.0.1:{upstream.server_port}", "ab"])
        assert result.exit_code == 1
        assert "has no model that can embed: name one with --model" in result.stderr

    def test_a_refusal_shows_the_server_s_reason(self, upstream: Upstream) -> None:
        """The error has status and message, with exit code 1."""
        place = f"http://127.0.0.1:{upstream.server_port}"
        result = runner.invoke(app, ["embed", "--url", place, "--model", "nobody", "a"])
        assert result.exit_code == 1
        assert "answered 404: no model nobody; known: all" in result.stderr

    def test_a_refused_connection_is_an_error(self, upstream: Upstream) -> None:
        """The error names the next step."""
        result = runner.invoke(app, ["embed", "--url", "http://127.0.0.1:1", "a"])
        assert result.exit_code == 1
        assert "is a server running there?" in result.stderr


def image_vector(data: bytes) -> Any:
    vector = compute_vector(tokenize_item(Image(data)), 32)
    return vector / np.linalg.norm(vector)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Create files in the current folder."""
    images = {f"{colour}.png": file_of(colour) for colour in ("red", "green", "blue")}
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    return images


class TestImages:
    @pytest.mark.parametrize(
        "words",
        [
            ["a b", "--image", "red.png", "green.png"],
            ["--image", "red.png", "green.png", "--", "a b"],
            ["--image=red.png", "a b", "--image", "green.png"],
            ["--image", "red.png", "--image", "green.png", "--", "a b"],
            ["--image", "red.png", "green.png", "--dimensions", "32", "a b"],
        ],
    )
    def test_texts_come_first(self, files: dict[str, bytes], words: list[str]) -> None:
        """Texts precede images in any order of arguments; a flag takes all words up to the next one, as from
        *.png."""
        result = runner.invoke(app, ["embed", "--model", "fake:images=1", *words])
        assert result.exit_code == 0, result.output
        right = [expected("a", "b"), image_vector(files["red.png"]), image_vector(files["green.png"])]
        assert np.allclose(json.loads(result.stdout), right)

    def test_images_alone(self, files: dict[str, bytes]) -> None:
        """Standard input is not read for texts; if named, it is an image."""
        result = runner.invoke(app, ["embed", "--model", "fake:images=1", "--image", "red.png"], input="a\n")
        assert np.allclose(json.loads(result.stdout), [image_vector(files["red.png"])])
        words = ["embed", "--model", "fake:images=1", "--image", "red.png", "-", "blue.png"]
        result = runner.invoke(app, words, input=files["green.png"])
        right = [image_vector(files[f"{colour}.png"]) for colour in ("red", "green", "blue")]
        assert np.allclose(json.loads(result.stdout), right)

    @pytest.mark.parametrize(
        ("name", "line"),
        [
            ("no.png", "no.png cannot be read: No such file or directory"),
            (".", ". cannot be read: Is a directory"),
            ("notes.txt", "notes.txt is not an image: pass a JPEG, PNG, WebP, GIF or BMP file"),
            ("-", "standard input is not an image: pass"),
        ],
    )
    @pytest.mark.parametrize("there", [[], ["--url", "http://127.0.0.1:1"]])
    def test_files_that_are_none_are_named(
        self, files: dict[str, bytes], name: str, line: str, there: list[str], tmp_path: Path
    ) -> None:
        """The error comes before a model is loaded or a server called."""
        (tmp_path / "notes.txt").write_text("notes")
        result = runner.invoke(app, ["embed", "--model", "fake:", *there, "--image", "red.png", name], input="text")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: {line}")

    def test_a_terminal_is_no_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        from shoal.cli._images import check_images
        from shoal.errors import InvalidValue

        monkeypatch.setattr("sys.stdin", Terminal())
        with pytest.raises(InvalidValue, match="pipe an image in"):
            check_images(["-"])

    def test_a_flag_without_a_file(self) -> None:
        """It is a usage error."""
        result = runner.invoke(app, ["embed", "a", "--image"])
        assert result.exit_code == 2
        assert "requires an argument" in result.stderr

    def test_a_model_of_texts_alone(self, files: dict[str, bytes]) -> None:
        result = runner.invoke(app, ["embed", "--model", "fake:", "--image", "red.png"])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: the model 'fake' accepts only text: send text, or name a model")

    def test_a_server_is_sent_the_files(self, files: dict[str, bytes], upstream: Upstream) -> None:
        """The files' bytes are sent, never their names; texts in the same list are objects too."""
        place = f"http://127.0.0.1:{upstream.server_port}"
        words = ["embed", "--url", place, "--model", "m", "ab", "--image", "red.png", "blue.png"]
        result = runner.invoke(app, words)
        assert result.exit_code == 0, result.output
        right = [2, len(files["red.png"]), len(files["blue.png"])]
        assert json.loads(result.stdout) == [[length] * 3 for length in right]
        assert upstream.requests[0]["input"][0] == {"text": "ab"}

    def test_a_request_holds_so_many_bytes(
        self, files: dict[str, bytes], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Requests stay below the server's body limit, and the rows stay in order."""
        monkeypatch.setattr("shoal.cli.embed._REMOTE_CHUNK_BYTES", len(files["red.png"]) + 1)
        place = f"http://127.0.0.1:{upstream.server_port}"
        words = ["a", "bb", "--image", "red.png", "green.png", "blue.png"]
        result = runner.invoke(app, ["embed", "--url", place, "--model", "m", *words])
        assert [len(body["input"]) for body in upstream.requests] == [4, 1]
        lengths = [1, 2, *(len(files[f"{colour}.png"]) for colour in ("red", "green", "blue"))]
        assert json.loads(result.stdout) == [[length] * 3 for length in lengths]

    @pytest.mark.parametrize("before", [[], ["red.png"]])
    def test_a_broken_image_is_named(
        self, files: dict[str, bytes], upstream: Upstream, before: list[str], tmp_path: Path
    ) -> None:
        """The error names the file, also for a single image."""
        (tmp_path / "broken.png").write_bytes(BROKEN)
        place = f"http://127.0.0.1:{upstream.server_port}"
        words = ["embed", "--url", place, "--model", "m", "--image", *before, "broken.png"]
        result = runner.invoke(app, words)
        assert result.exit_code == 1
        assert "/v1/embeddings answered 400: broken.png: the image cannot be read: no" in result.stderr
