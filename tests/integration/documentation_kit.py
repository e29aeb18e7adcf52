"""Runs the blocks of a page of the documentation in order, as a reader would.

What differs from a reader's machine: models come from the hub at HF_ENDPOINT, ports are free ones, and `places` says
what stands for the servers of others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.integration.llm_kit import free_port
from tests.integration.server_kit import LISTENING, Server, environment, wait_until
from tests.integration.triton_app_kit import hub_with, tiny_files
from tests.unit.docs.blocks import ROOT, Block, blocks_of
from tests.unit.models.classifiers import classifier
from tests.unit.models.tower_checkpoints import towers

IR = ROOT / "tests" / "fixtures" / "tiny_llama_ir"

PATIENCE_S = 120.0
SERVE = re.compile(r"^((?:[A-Z_]+=\S* )*)((?:\.venv/bin/)?shoal serve\b[^#\n]*(?:#\w[^#\n]*)*).*$", re.MULTILINE)
"""A line that starts a server: its assignments, and its command without a comment. A # in an address is none."""

MAKE = {"make serve": ".venv/bin/shoal serve", "make test": ":"}
"""What a target does once everything is installed, as in the Makefile. The tests are running already."""

PRELUDE = 'set -euo pipefail\ncurl() { command curl --fail-with-body --max-time 60 "$@"; echo; }\n'
"""An error status fails a block."""


class Reader:
    """Reads pages in an empty folder. `ports`: ports of a page that are not the server's own. `flags`: added to each
    server's."""

    def __init__(
        self,
        folder: Path,
        port: int,
        env: Mapping[str, str],
        *,
        ports: Mapping[str, int] | None = None,
        places: Mapping[str, str] | None = None,
        flags: str = "",
    ) -> None:
        self.folder, self._port, self._flags = folder, port, flags
        self._ports, self._places = dict(ports or {}), dict(places or {})
        self._log = folder / "server.log"
        self._server: Server | None = None
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "examples").symlink_to(ROOT / "examples")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = environment({**env, "HOME": str(folder), "PATH": path, "SHOAL_PORT": str(port)})

    def read(self, page: str) -> str:
        """Run every block without a reason not to. Returns what they printed; fails with the output of a block."""
        return "".join(self._run(block) for block in blocks_of(ROOT / page) if not block.reason)

    def close(self) -> None:
        """Stop the server, which has to end well."""
        if self._server is not None:
            self._server.process.terminate()
            assert self._server.exit_code(PATIENCE_S) == 0, self._log.read_text()
            self._server = None

    def _run(self, block: Block) -> str:
        text = self._translate(block.text)
        if block.language == "toml":
            (self.folder / "shoal.toml").write_text(text)
        elif block.language == "python":
            return self._execute(block, [sys.executable, "-c", text])
        elif block.language == "sh":
            return self._shell(block, text)
        return ""

    def _translate(self, text: str) -> str:
        text = re.sub(
            r"\b(localhost|127\.0\.0\.1):(\d{4,5})\b",
            lambda match: f"{match[1]}:{self._ports.get(match[2], self._port)}",
            text.replace("\\\n", " "),
        )
        for theirs, ours in self._places.items():
            text = text.replace(theirs, ours)
        for target, command in MAKE.items():
            text = re.sub(f"^{target}", command, text, flags=re.MULTILINE)
        return text

    def _shell(self, block: Block, text: str) -> str:
        printed, start = "", 0
        for match in SERVE.finditer(text):
            printed += self._script(block, text[start : match.start()])
            self.serve(match[2], match[1])
            start = match.end()
        return printed + self._script(block, text[start:])

    def _script(self, block: Block, text: str) -> str:
        return self._execute(block, ["bash", "-c", PRELUDE + text]) if text.strip() else ""

    def _execute(self, block: Block, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._env,
            input="What is a shoal?\n",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            log = self._log.read_text() if self._log.exists() else ""
            pytest.fail(f"{block} ended with {done.returncode}:\n{done.stdout}{done.stderr}\nThe server:\n{log}")
        return done.stdout

    def serve(self, command: str, assignments: str = "") -> None:
        """Start a server in place of the one before, and wait until it is ready."""
        self.close()
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"{assignments}exec {command.rstrip('& ')} {self._flags}"],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._server = Server(process, self._port, self._log)
        wait_until(lambda: bool(LISTENING.search(self._log.read_text())), process, self._log)
        wait_until(self._server.ready, process, self._log)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A hub that has tiny models under the names of the pages, except the default model, which PyPI has; and a store
    that all pages share."""
    folder = tmp_path_factory.mktemp("hub")
    models = {
        "intfloat/e5-small-v2": tiny_files(folder / "e5", "bert"),
        "BAAI/bge-small-en-v1.5": tiny_files(folder / "bge", "bert"),
        "cross-encoder/ms-marco-MiniLM-L6-v2": files_in(classifier(folder / "marco")),
        "mixedbread-ai/mxbai-rerank-xsmall-v1": files_in(classifier(folder / "mxbai")),
        "openai/clip-vit-base-patch32": files_in(towers(folder / "clip")),
        "OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov": files_in(IR),
    }
    with hub_with(models) as hub:
        yield {"HF_ENDPOINT": hub, "SHOAL_HOME": str(folder / "home")}


NewReader: TypeAlias = Callable[..., Reader]


@pytest.fixture
def reader(tmp_path: Path, environ: dict[str, str]) -> Iterator[NewReader]:
    """`reader(**places)`: a reader whose server is stopped after the test."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    readers: list[Reader] = []

    def arrive(**options: Any) -> Reader:
        readers.append(Reader(tmp_path, free_port(), environ, **options))
        return readers[-1]

    yield arrive
    for each in readers:
        each.close()
