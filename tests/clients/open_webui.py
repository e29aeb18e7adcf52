"""Sends chats through a real Open WebUI to a model whose template has no tools: `python -m tests.clients.open_webui`.

    python3.11 -m venv /tmp/open-webui && /tmp/open-webui/bin/pip install "open-webui==0.12.*"   # 7 GB
    python -m tests.clients.open_webui /tmp/open-webui/bin/open-webui [--ollama]

It starts Shoal and Open WebUI with its default settings, signs up, opens a chat as the page does, and prints Open
WebUI's requests and the chat. Exits with 1 if there is no answer. Too large for `make test-clients`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tests.integration.llm_kit import free_port

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATIENCE_S = 240.0


def call(url: str, body: Any = None, token: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    with urlopen(Request(url, data, headers), timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def until(what: str, done: Callable[[], Any]) -> Any:
    """Return the result of `done` once it is true. Raises SystemExit on timeout."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if result := done():
                return result
        except (URLError, HTTPError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"{what} did not happen within {PATIENCE_S:g} s")


class Recorder(ThreadingHTTPServer):
    """Passes requests on to Shoal and records the bodies of chats with the status and headers of their answers."""

    def __init__(self, shoal: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.shoal = shoal
        self.seen: list[tuple[dict[str, Any], int, dict[str, str]]] = []


class _Passing(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._pass(None)

    def do_POST(self) -> None:
        self._pass(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _pass(self, body: bytes | None) -> None:
        headers = {"content-type": self.headers.get("content-type", "application/json")}
        try:
            answer = urlopen(Request(self.server.shoal + self.path, body, headers), timeout=120)
        except HTTPError as refused:
            answer = refused
        with answer:
            content, status = answer.read(), answer.status
        if body is not None and "chat" in self.path:
            self.server.seen.append((json.loads(body), status, dict(answer.headers.items())))
        self.send_response(status)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the bodies are recorded."""


def model(folder: Path) -> Path:
    """The tiny Llama with a template without tools."""
    shutil.copytree(FIXTURE, folder / "plain")
    settings = json.loads((folder / "plain" / "tokenizer_config.json").read_bytes())
    (folder / "plain" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": PLAIN}))
    return folder / "plain"


def chat(webui: str, token: str, model: str) -> str:
    """Return the final text of the assistant's message, or its error."""
    question, answer = str(uuid.uuid4()), str(uuid.uuid4())
    request = {"id": question, "parentId": None, "childrenIds": [answer], "role": "user", "content": "What time is it?"}
    empty = {
        "id": answer,
        "parentId": question,
        "childrenIds": [],
        "role": "assistant",
        "content": "",
        "model": model,
    }
    history = {"messages": {question: request, answer: empty}, "currentId": answer}
    whole = {"title": "t", "models": [model], "history": history, "messages": [request, empty]}
    new_chat = call(f"{webui}/api/v1/chats/new", {"chat": whole}, token)
    body = {
        "stream": True,
        "model": model,
        "messages": [{"role": "user", "content": request["content"]}],
        "params": {},
        "features": {},
        "session_id": str(uuid.uuid4()),
        "chat_id": new_chat["id"],
        "id": answer,
        "user_message": request,
    }
    call(f"{webui}/api/chat/completions", body, token)

    def finished() -> str:
        message = call(f"{webui}/api/v1/chats/{new_chat['id']}", None, token)["chat"]["history"]["messages"][answer]
        return str(message.get("error") or "") or str(message.get("content") or "")

    return str(until("an answer", finished))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("open_webui", type=Path, help="its executable")
    parser.add_argument("--ollama", action="store_true", help="speak Ollama's API instead of OpenAI's")
    options = parser.parse_args()
    ports = free_port(), free_port()
    shoal, webui = (f"http://127.0.0.1:{port}" for port in ports)
    recorder = Recorder(shoal)
    Thread(target=recorder.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        place = f"http://127.0.0.1:{recorder.server_port}"
        own = {
            "DATA_DIR": str(folder / "data"),
            "WEBUI_SECRET_KEY": "test",
            "ENABLE_OLLAMA_API": str(options.ollama).lower(),
            "ENABLE_OPENAI_API": str(not options.ollama).lower(),
            "OLLAMA_BASE_URL": place,
            "OPENAI_API_BASE_URL": f"{place}/v1",
            "OPENAI_API_KEY": "none",
            "OFFLINE_MODE": "true",
            "RAG_EMBEDDING_ENGINE": "openai",
        }
        serve = ("-m", "shoal", "serve", f"plain=file:{model(folder)}", "--port", str(ports[0]))
        rules = ("--threads", "1", "--default-max-tokens", "24", "--kv-cache-mb", "64")
        commands = (
            ([sys.executable, *serve, *rules], {"SHOAL_HOME": str(folder / "home")}),
            ([str(options.open_webui), "serve", "--host", "127.0.0.1", "--port", str(ports[1])], own),
        )
        with (folder / "log").open("wb") as log:
            processes = [
                subprocess.Popen(command, env=os.environ | more, cwd=folder, stdout=log, stderr=log)
                if number
                else subprocess.Popen(command, env=os.environ | more, stdout=log, stderr=log)
                for number, (command, more) in enumerate(commands)
            ]
        try:
            until("Shoal's start", lambda: urlopen(f"{shoal}/health/ready", timeout=5).status == 200)
            until("Open WebUI's start", lambda: call(f"{webui}/health"))
            user = {"name": "a", "email": "a@example.org", "password": "a-long-Passw0rd"}
            token = call(f"{webui}/api/v1/auths/signup", user)["token"]
            models = until("the list of models", lambda: call(f"{webui}/api/models", None, token)["data"])
            text = chat(webui, token, next(each["id"] for each in models if each["id"].startswith("plain")))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
    for body, status, headers in recorder.seen:
        tools = [tool["function"]["name"] for tool in body.get("tools") or []]
        fields = {key: value for key, value in body.items() if key not in ("tools", "messages")}
        ignored = headers.get("x-shoal-ignored")
        sys.stdout.write(f"asked {fields} with {len(tools)} tools {tools}: {status}, ignored {ignored}\n")
    sys.stdout.write(f"in the chat: {text!r}\n")
    offered = any(body.get("tools") for body, _, _ in recorder.seen)
    return 0 if offered and all(status == 200 for _, status, _ in recorder.seen) else 1


if __name__ == "__main__":
    sys.exit(main())
