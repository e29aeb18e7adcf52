"""Ollama's own command line client against `shoal serve --as ollama`.

    python -m tests.clients.ollama_cli PATH/TO/ollama

A script, not a test of the suite, because no package index has the client ready to run: `make test-ollama` builds
it. It runs the client as a user does, with and without a terminal, prints its output, and exits with 1 if that is not
as expected. The default model must be in the store, or downloadable.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_MINILM = "sentence-transformers/all-MiniLM-L6-v2"

CHECKS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--version",), 0, r"^ollama version is \S+\n$"),
    (("list",), 0, rf"{_MINILM}:latest +[0-9a-f]{{12}} +\d+ MB .*\ntalker:latest"),
    (("ls", "tal"), 0, r"(?!.*MiniLM).*talker:latest"),
    (
        ("show", "all-minilm"),
        0,
        r"parameters +22\.6M.*context length +256.*embedding length +384.*Capabilities\s+embedding",
    ),
    (("show", "talker"), 0, r"Capabilities\s+completion\s*$"),
    (("show", "--template", "talker"), 0, r"messages"),
    (("show", "--modelfile", "talker"), 0, r"^FROM fake"),
    (("show", "nothing"), 1, r"^Error: model 'nothing' not found: available models"),
    (("run", "talker", "one two three"), 0, r"^one two three\n"),
    (("run", "talker:latest", "--verbose", "--nowordwrap", "one"), 0, r"^one\n.*eval count: +1 token"),
    (("run", "talker", "--keepalive", "10m", "one"), 0, r"^one\n"),
    (("run", "talker", "--think=false", "one"), 0, r"^one\n"),
    (("run", "all-minilm", "one"), 0, r"^\[-?0\.\d+,.*\]\n$"),
    (("run", "all-minilm:22m", "--dimensions", "8", "one"), 0, r"^\[([^,]+,){7}[^,]+\]\n$"),
    (("ps",), 0, rf"{_MINILM}:latest .* 100% CPU +256 +4 minutes from now"),
    (("stop", "all-minilm"), 0, r"^\s*$"),
    (("ps",), 0, r"(?s)^(?!.*MiniLM)"),
    (("list",), 0, rf"{_MINILM}:latest +[0-9a-f]{{12}} +\d+ MB "),
    (("stop", "nothing"), 1, r"""Error: couldn't find model "nothing" to stop"""),
    (("pull", "all-minilm"), 0, r"success"),
    (("pull", "llama3.2:1b"), 1, r"Error: .*'llama3\.2:1b' is a name in Ollama's library.* hf\.co/org/name"),
    (("pull", "mistral:7b"), 1, r"Error: .*name in Ollama's library"),
    (("cp", "talker", "other"), 1, r"^Error: This server does not copy models"),
    (("push", "talker"), 1, r"^Error: This server has no accounts: it neither pushes models"),
    (("signin",), 1, r"^Error: This server has no accounts: it neither pushes"),
    (("signout",), 1, r"^Error: This server has no accounts: it neither pushes"),
    (("rm", "nothing"), 1, r"Error: model 'nothing' not found"),
    (("create", "mine", "-f", "Modelfile"), 1, r"Error: .*This server does not create models"),
    (("create", "mine", "-f", "Modelfile.gguf"), 1, r"Error: .*This server does not create models"),
)
"""Arguments, exit code, and a pattern for the output."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def client(binary: str, port: int, home: Path, *arguments: str, stdin: str = "") -> tuple[int, str]:
    environment = {**os.environ, "HOME": str(home), "OLLAMA_HOST": f"127.0.0.1:{port}"}
    done = subprocess.run(
        [binary, *arguments],
        check=False,
        cwd=home,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, _TERMINAL.sub("", done.stdout + done.stderr)


def conversation(binary: str, port: int, home: Path, *lines: str) -> str:
    """Return the terminal's output for a user who types these lines."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "HOME": str(home), "OLLAMA_HOST": f"127.0.0.1:{port}", "TERM": "xterm"}
        os.execve(binary, [binary, "run", "talker"], environment)
    output = _read(terminal, ">>> ")
    for line in lines:
        os.write(terminal, line.encode() + b"\r")
        output += _read(terminal, ">>> " if line != "/bye" else "\0")
    os.waitpid(pid, 0)
    return _TERMINAL.sub("", output)


def _read(terminal: int, until: str, seconds: float = 15.0) -> str:
    output, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                output += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the other side has exited
                return output
        elif until in output:
            return output
    return output


def main(binary: str) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        (home / "Modelfile").write_text("FROM talker\nSYSTEM Be brief.\n")
        (home / "Modelfile.gguf").write_text("FROM ./large.gguf\n")
        with (home / "large.gguf").open("wb") as file:
            file.write(b"GGUF\3\0\0\0")
            file.truncate(200 * 2**20)
        command = [sys.executable, "-m", "shoal", "serve", "--as", "ollama", "--port", "0", "all-MiniLM-L6-v2"]
        with subprocess.Popen([*command, "talker=fake:token_ms=1"], stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            port = next(int(match[1]) for line in server.stderr if (match := _LISTENING.search(line)))
            next(line for line in server.stderr if "try: " in line)
            for arguments, code, pattern in CHECKS:
                got, output = client(binary, port, home, *arguments)
                passed = got == code and re.search(pattern, output, re.DOTALL) is not None
                wrong += not passed
                say(
                    f"{'ok   ' if passed else 'WRONG'} ollama {' '.join(arguments)} -> {got}\n      "
                    f"{output.strip()[:400]}"
                )
            got, output = client(binary, port, home, "run", "talker", stdin="from a pipe")
            transcript = conversation(
                binary, port, home, "hello there", "/show info", "/set parameter temperature 1", "/bye"
            )
            for what, passed in (
                ("stdin", output.startswith("from a pipe")),
                ("a terminal", "\nhello there\n" in transcript),
            ):
                wrong += not passed
                say(f"{'ok   ' if passed else 'WRONG'} {what}")
            say(transcript)
            server.terminate()
    say(f"{wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main(str(Path(sys.argv[1]).resolve())))
