"""Running peers: their environments, folders and processes."""

from __future__ import annotations

import json
import os
import signal
import string
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from harness import HERE, Server, free_port, phase, wrk_lines

from .environments import Unavailable, install, last_lines, run
from .figures import CPU, P50, RATE, Figures, Rounds, turned
from .processes import tree_cpu_s
from .table import ENVIRONMENTS, ONNX_EXPORT, Contest, Peer

Contender = TypeVar("Contender")

FAILURES = (OSError, RuntimeError, subprocess.CalledProcessError)
"""Of a run under load."""

PAUSE_S = 0.3
"""Between two contenders: threads of the last one stop spinning."""

FOLDER = HERE.parent / ".venv-peers"


class PeerServer(Server):
    """A peer's process; `places` fills in its templates."""

    def __init__(self, peer: Peer, places: dict[str, str]) -> None:
        super().__init__()
        self.peer = peer
        self.ready_path = peer.ready
        self.ready_limit_s = peer.ready_limit_s
        self._places = {"port": str(self.port), "side_port": str(free_port()), **places}

    def command(self) -> list[str]:
        return [self._fill(part) for part in self.peer.command]

    def environment(self) -> dict[str, str]:
        return {name: self._fill(value) for name, value in self.peer.variables.items()}

    def served_model(self) -> str:
        return self.peer.model

    def __enter__(self) -> PeerServer:
        for name, text in self.peer.files.items():
            (Path(self._places["work"]) / name).write_text(self._fill(text))
        try:
            super().__enter__()
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"did not start: {last_lines(str(error))}") from error
        return self

    def _stop(self) -> None:
        super()._stop()
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # workers that outlived it

    def _fill(self, template: str) -> str:
        return string.Template(template).substitute(self._places)


class Field:
    """Who takes part, and who cannot: a `state` a peer, with versions or the reason."""

    def __init__(self, names: Iterable[str]) -> None:
        self.states: dict[str, str] = {}
        self.installed: dict[str, dict[str, str]] = {}
        self._names = frozenset(names)
        self._unavailable: dict[str, str] = {}

    def chosen(self, peers: Iterable[Peer], contest: Contest) -> list[Peer]:
        return [peer for peer in peers if peer.contest == contest and self.wants(peer.name)]

    def wants(self, name: str) -> bool:
        return not self._names or name in self._names

    def note(self, name: str, reason: str) -> None:
        self.states[name] = reason
        print(f"{name}: {reason}", flush=True)

    def qualify(self, name: str, reason: str) -> None:
        """Add what a peer that was measured did not do."""
        self.note(name, f"{self.states.get(name, 'measured')}; {reason}")

    def start(self, stack: ExitStack, peers: Iterable[Peer], **places: str) -> dict[str, PeerServer]:
        """Install and start peers; those that fail are noted with their reason and left out."""
        servers: dict[str, PeerServer] = {}
        for peer in peers:
            try:
                with phase(peer.name):
                    found = places | self.locate(peer)
                    found["work"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-peers-"))
                    found.setdefault("threads", str(threads()))
                    servers[peer.name] = stack.enter_context(PeerServer(peer, found))
                    self.states[peer.name] = "measured"
            except Unavailable as error:
                self.note(peer.name, f"not measured: {error}")
        return servers

    def locate(self, peer: Peer) -> dict[str, str]:
        """Where a peer's program is. Raises Unavailable."""
        if peer.binary_variable:
            path = os.environ.get(peer.binary_variable, "")
            if not path:
                raise Unavailable(f"{peer.binary_variable} names no program; build it by {peer.build}")
            if not os.access(path, os.X_OK):
                raise Unavailable(f"{peer.binary_variable}={path} is not a program")
            return {"binary": path}
        return {"bin": str(self.prepare(peer.environment) / "bin")}

    def prepare(self, environment: str) -> Path:
        """Install an environment once. Raises Unavailable, each time with the same reason."""
        folder = FOLDER / environment
        if environment in self._unavailable:
            raise Unavailable(self._unavailable[environment])
        if environment not in self.installed:
            try:
                self.installed[environment] = install(folder, ENVIRONMENTS[environment])
            except Unavailable as error:
                self._unavailable[environment] = str(error)
                raise
        return folder

    def export_onnx(self, model: Path) -> str:
        """A folder for the model's ONNX graph, made once by Infinity's tools; empty where that fails, after a note."""
        folder = FOLDER / "onnx" / model.parent.name
        if not (folder / "model.onnx").exists():
            try:
                with phase("exporting the ONNX graph"):
                    places = {"bin": str(self.prepare("infinity") / "bin"), "model": str(model), "onnx": str(folder)}
                    run([string.Template(part).substitute(places) for part in ONNX_EXPORT], 600)
            except Unavailable as error:
                self.note("ONNX graph", f"not exported: {error}")
        return str(folder)


class Turns(Generic[Contender]):
    """Alternating rounds; a peer that fails in one is noted and takes no further part.

    `essential` contenders may not fail: without them the others have nothing to be compared with.
    """

    def __init__(self, label: str, field: Field, contenders: Mapping[str, Contender], essential: Iterable[str]) -> None:
        self.rounds = Rounds()
        self.label = label
        self.contenders = dict(contenders)
        self._field = field
        self._essential = frozenset(essential)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.contenders if name not in self._essential]

    def report(self, unit: str, comparisons: Mapping[str, str], latency: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a contest, ratios first, of which the first is printed. `comparisons`: heading -> the contender
        of ours that is compared with the peers; `latency`: heading -> table."""
        rounds = self.rounds
        ratios = {heading: rounds.ratios(mine, self.peers) for heading, mine in comparisons.items()}
        print(json.dumps(next(iter(ratios.values())), indent=1), flush=True)
        return {
            **ratios,
            f"processor time, us a {unit}": rounds.table(CPU),
            f"{unit}s/s": rounds.table(RATE),
            **latency,
            "rounds": rounds.raw(),
        }

    def play(self, clients: int, measure: Callable[[str, Contender], Figures], number: int) -> None:
        """Round `number` at so many clients."""
        for name, figures in self.once(measure, number).items():
            self.rounds.add(name, clients, figures)

    def once(self, measure: Callable[[str, Contender], Figures], number: int = 0) -> dict[str, Figures]:
        """One round, which `rounds` does not count."""
        found: dict[str, Figures] = {}
        for name, contender in list(turned(self.contenders, number)):
            try:
                found[name] = self._measure_twice(name, contender, measure)
            except FAILURES as error:
                if name in self._essential:
                    raise
                self._field.qualify(name, f"{self.label} failed under load: {last_lines(str(error), characters=150)}")
                self.rounds.drop(name)
                del self.contenders[name]
            time.sleep(PAUSE_S)
        return {name: found[name] for name in self.contenders}

    def _measure_twice(self, name: str, contender: Contender, measure: Callable[[str, Contender], Figures]) -> Figures:
        """A run with an error measures nothing: it is repeated once, and noted."""
        try:
            return measure(name, contender)
        except FAILURES as error:
            self._field.qualify(name, f"a run of {self.label} was repeated: {last_lines(str(error), characters=150)}")
            return measure(name, contender)


def measure_load(server: Server, path: str, lines: Iterable[bytes], clients: int, seconds: float) -> Figures:
    """One run of wrk, and the processor time of the server's process tree meanwhile."""
    assert server.process is not None
    before = tree_cpu_s(server.process.pid)
    ran = wrk_lines(server, path, lines, clients, seconds)
    spent = tree_cpu_s(server.process.pid) - before
    return {RATE: ran["per_s"], P50: ran["p50"], CPU: spent / ran["requests"] * 1e6}


def threads() -> int:
    return len(os.sched_getaffinity(0))


def post(server: Server, path: str, body: bytes) -> bytes:
    """The answer to one request. Raises Unavailable unless it is a 200."""
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: bytes = reply.read()
    except urllib.error.HTTPError as error:
        raise Unavailable(
            f"{path} returned {error.code}: {last_lines(error.read().decode(errors='replace'))}"
        ) from error
    except OSError as error:
        raise Unavailable(f"{path}: {error}") from error
    return answer


def read_vector(answer: bytes) -> list[float]:
    """The first embedding of an OpenAI answer. Raises Unavailable when there is none."""
    try:
        found: Any = json.loads(answer)["data"][0]["embedding"]
        return [float(value) for value in found]
    except (ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"no embedding in {answer[:100]!r}") from error


def host_and_port(url: str) -> dict[str, str]:
    """The places of a server behind."""
    parts = urlsplit(url)
    return {"upstream": url, "upstream_host": str(parts.hostname), "upstream_port": str(parts.port)}
