"""What the benchmarks share: a server of their own, wrk, texts whose length is checked, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from shoal.bench.machine import PACKAGES, describe_machine
from shoal.bench.texts import Bodies, Encoding, Texts

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Server:
    """A `shoal serve` process of this benchmark; `settings` travel in its environment, all else is default.

    Subclasses run other servers: they change `program`, `command`, `environment`, `ready_path` or `served_model`.
    """

    program: Sequence[str] = ("-m", "shoal")
    ready_path = "/health/ready"
    ready_limit_s = 900.0

    def __init__(self, address: str = "", **settings: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._address = address
        self._settings = settings
        self.model = ""
        self.ready_s = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server

    def __enter__(self) -> Server:
        start = time.perf_counter()
        self.process = subprocess.Popen(
            self.command(),
            env=os.environ | self.environment(),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self._wait(start, self.ready_limit_s)
        except BaseException:
            self._stop()
            raise
        self.ready_s = time.perf_counter() - start
        self.model = self.served_model()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def command(self) -> list[str]:
        """Program and arguments; `Server` adds nothing to it."""
        address = [self._address] if self._address else []
        return [sys.executable, *self.program, "serve", *address, "--port", str(self.port)]

    def environment(self) -> dict[str, str]:
        """Variables beside those of this process."""
        return {f"SHOAL_{name.upper()}": str(value) for name, value in self._settings.items()}

    def served_model(self) -> str:
        """The name that requests give the model, once the server is ready."""
        name: str = self.get("/v1/models")["data"][0]["id"]
        return name

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            body: bytes = reply.read()
        return body.decode()

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def card(self) -> dict[str, Any]:
        """What the server says of its model."""
        found: dict[str, Any] = self.get(f"/v1/models/{self.model}")
        return found

    def batch_counts(self) -> tuple[float, float]:
        """Items in batches, and batches, since the server started."""
        lines = [line.rpartition(" ") for line in self.text("/metrics").splitlines() if not line.startswith("#")]
        items, batches = (
            sum(float(value) for name, _, value in lines if name.startswith(f"shoal_batch_size_{part}"))
            for part in ("sum", "count")
        )
        return items, batches

    def status_kb(self, key: str) -> int:
        """A line of /proc/PID/status, such as VmRSS."""
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{key}:\s+(\d+)", text, re.M)
        return int(found.group(1)) if found else 0

    def cpu_s(self) -> float:
        """Processor seconds that the server has used so far, over all threads."""
        assert self.process is not None
        return cpu_s(self.process.pid)

    def waited_s(self) -> float:
        """Seconds that the thread of its event loop was ready to run and had no core (Linux). Where that is a good part
        of the time, latencies are the machine's: a server of an own session gets one share of the cores beside each
        other session's, however many threads those have."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9

    def settle(self, seconds: float = 60.0) -> float:
        """Wait until the work that begins after readiness (warming shapes) is over; how long that took."""
        start = time.perf_counter()
        quiet = 0
        while quiet < 3 and time.perf_counter() - start < seconds:
            before = self.cpu_s()
            time.sleep(0.5)
            quiet = quiet + 1 if self.cpu_s() - before < 0.05 else 0
        return time.perf_counter() - start

    def _wait(self, start: float, limit: float) -> None:
        assert self.process is not None
        while time.perf_counter() - start < limit:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self._tail()}")
            try:
                with urllib.request.urlopen(self.url + self.ready_path, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise RuntimeError(f"the server was not ready after {limit} s:\n{self._tail()}")

    def _stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:].decode(errors="replace")


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used so far, over all its threads, those of its children not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wrk(
    server: Server,
    tokens: int,
    clients: int,
    seconds: float,
    *,
    expected: float = 6000.0,
    each: int = 1,
    encoding: Encoding = "float",
) -> dict[str, Any]:
    """Closed loop by wrk on one thread, `each` distinct texts a request; `expected` requests a second decide how many
    bodies are made.

    Raises RuntimeError when a body had to be sent twice: the figures would not be about distinct texts.
    """
    bodies = Bodies("openai", server.model, encoding, "")
    texts = Texts(tokens, seed=random.getrandbits(48))
    count = int(expected * (seconds + 1))
    lines = (bodies.body(texts.take(each)) for _ in range(count))
    return wrk_lines(server, "/v1/embeddings", lines, clients, seconds)


def wrk_threads() -> int:
    """Threads of wrk for servers that use many cores: one for every four cores."""
    return max(1, len(os.sched_getaffinity(0)) // 4)


def wrk_lines(
    server: Server, path: str, lines: Iterable[bytes], clients: int, seconds: float, *, threads: int = 1
) -> dict[str, Any]:
    """Closed loop by wrk, which posts each of `lines` once, on at most one thread a client.

    Raises RuntimeError when there were too few lines.
    """
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    count = 0
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        for line in lines:
            file.write(line + b"\n")
            count += 1
        file.flush()
        threads = min(threads, clients)
        load = [f"-t{threads}", f"-c{clients}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        script = ["-s", str(HERE / "wrk.lua"), server.url, "--", file.name, path, str(threads)]
        command = [program, *load, *script]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output.partition("RESULT ")[2].splitlines()[0])
    if found["repeated"]:
        raise RuntimeError(f"{found['sent']} requests, but only {count} distinct bodies: raise `expected`")
    if found["errors"] or not found["requests"]:
        refusal = output.partition("REFUSED ")[2].partition("\n")[0]
        raise RuntimeError(f"a run with errors, or without answers, measures nothing: {found} {refusal}")
    found["per_s"] = round(found["requests"] / found["seconds"], 1)
    return found


def stored(model: str = "") -> Any:
    """The model's entry in the store (the newest one without a name). Exits when there is none."""
    from shoal.models.store import Store

    found = [one for one in Store(home()).entries() if not model or model in (one.manifest.id, one.manifest.address)]
    if not found:
        raise SystemExit("there is no model in the store: run `shoal pull` first")
    return found[0]


def home() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or "~/.cache/shoal").expanduser()


def check_lengths(tokenizer: Path, lengths: Iterable[int]) -> dict[str, int]:
    """Prove with the model's own tokenizer that texts of these lengths have them; tokens asked for -> counted."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.no_truncation()
    counted: dict[str, int] = {}
    for length in lengths:
        found = {len(one.ids) for one in reader.encode_batch_fast(Texts(length, seed=7).take(500))}
        if found != {length}:
            raise RuntimeError(f"texts of {length} tokens have {sorted(found)} with {tokenizer}")
        counted[str(length)] = length
    return counted


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {key: round(median(one[key] for one in rounds if key in one), 3) for key in rounds[0]}


def write(name: str, method: str, results: Any, packages: tuple[str, ...] = PACKAGES) -> Path:
    """results/NAME.json: machine, versions, date, how it was measured, figures."""
    RESULTS.mkdir(exist_ok=True)
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(packages),
        "method": " ".join(method.split()),
        "results": results,
    }
    path = RESULTS / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    print(f"wrote {path.relative_to(HERE.parent)}")
    return path


def parser(description: str | None) -> argparse.ArgumentParser:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with Server` ends its process
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", default="", help="address to serve; the default model without")
    made.add_argument("--rounds", type=int, default=3, help="runs of each measurement; medians are reported")
    made.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    return made


@contextmanager
def phase(text: str) -> Iterator[None]:
    start = time.perf_counter()
    print(f"{text} ...", flush=True)
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)
