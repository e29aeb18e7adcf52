"""`shoal doctor`: each check, what it advises, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import config
from shoal.backends import parse_address
from shoal.cli import _machine_checks as machine
from shoal.cli import _network_checks as network
from shoal.cli import app
from shoal.cli._finding import Finding
from shoal.cli.doctor import CHECKS
from shoal.config import LoadedConfig
from shoal.errors import TransportFailed
from shoal.models.address import Address, ServedModel
from tests.unit.cli.servers import Quiet, serve_in_thread


def load(*addresses: str, **environ: str) -> LoadedConfig:
    return config.load({config.MODELS: list(addresses)}, {f"SHOAL_{name}": text for name, text in environ.items()})


def find(check: Callable[[LoadedConfig], Iterator[Finding]], loaded: LoadedConfig | None = None) -> Finding:
    """Return the first finding of a check."""
    return next(check(loaded or load()))


class Answer(Quiet):
    """A Shoal server with a loaded and an unloaded model."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        models = [{"id": name, "status": {"value": state}} for name, state in (("a", "loaded"), ("b", "unloaded"))]
        body = json.dumps({"data": models}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class NoHttp(Quiet):
    """Answers in another protocol."""

    def do_HEAD(self) -> None:
        self.wfile.write(b"SSH-2.0-x\r\n")


@pytest.fixture
def server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Answer) as listening, serve_in_thread(listening):
        yield listening.server_port


def test_this_machine_passes() -> None:
    """What this test runs on has a Python and cores; each finding has its name."""
    for name in ("python", "processor", "memory", "descriptors", "gpu", "engines"):
        finding = find(getattr(machine, f"check_{name}"))
        assert finding.name == name
        assert finding.text
        assert finding.state == "ok" or finding.advice


def test_limits_below_need_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the setting of the system that raises them."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert "LimitNOFILE" in find(machine.check_descriptors).advice
    monkeypatch.setattr("shoal.machine_limits.available_bytes", lambda: 10**9)
    assert find(machine.check_memory).state == "warn"
    monkeypatch.setattr(machine, "LOW_DISK", 1 << 80)
    assert "shoal rm" in find(machine.check_disk).advice


def test_a_home_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    """A file stands where the folder should."""
    (tmp_path / "file").touch()
    finding = find(machine.check_disk, load(HOME=str(tmp_path / "file" / "home")))
    assert finding.state == "fail"
    assert "SHOAL_HOME" in finding.advice


def test_a_home_in_a_folder_that_cannot_be_entered_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names inside it cannot even be looked up."""
    closed = tmp_path / "closed"
    closed.mkdir()
    stat = os.stat

    def refuse(place: str | Path, **options: Any) -> os.stat_result:
        if closed in Path(place).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return stat(place, **options)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != closed)
    finding = find(machine.check_disk, load(HOME=str(closed / "shoal" / "home")))
    assert (finding.state, finding.text.endswith("cannot be written")) == ("fail", True)


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 580.1'", ("ok", "warn"), "NVIDIA H100, 81559 MiB, 580.1"),
        ("echo 'no driver' >&2; exit 9", ("fail",), "nvidia-smi fails: no driver"),
    ],
)
def test_the_gpu_is_what_nvidia_smi_lists(
    script: str, state: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken driver is a failure; a GPU without a CUDA build of PyTorch is a warning."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = find(machine.check_gpu)
    assert finding.state in state
    assert text in finding.text


@pytest.mark.parametrize(
    ("torch", "state"), [("", "warn"), ("2.11.0+cpu", "warn"), ("2.11.0", "ok"), ("2.11.0+cu130", "ok")]
)
def test_a_gpu_needs_a_build_of_torch_that_uses_it(torch: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is what to install."""
    monkeypatch.setattr(machine, "_version", lambda package: torch)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/echo")
    assert find(machine.check_gpu).state == state


def test_no_engine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other servers need none."""
    monkeypatch.setattr(machine, "_version", lambda package: "")
    assert "pip install" in find(machine.check_engines).advice


def test_a_free_port_a_shoal_server_and_another_program(server: int) -> None:
    """Only another program is a failure."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        network_timeout, network.PROBE_TIMEOUT_S = network.PROBE_TIMEOUT_S, 0.1
        try:
            taken = find(network.check_ports, load(PORT=str(port)))
        finally:
            network.PROBE_TIMEOUT_S = network_timeout
    assert taken.state == "fail"
    assert "choose another with --port" in taken.advice
    assert find(network.check_ports, load(PORT=str(port))).text.endswith("is free")
    running = find(network.check_ports, load(PORT=str(server)))
    assert (running.state, running.text.partition("with ")[2]) == ("ok", "a")
    assert [each.name for each in network.check_ports(load(PORT="0", GRPC_PORT=str(port)))] == ["grpc port"]


def test_an_occupied_grpc_port(server: int) -> None:
    """A Shoal server at the HTTP port probably uses it; otherwise another program does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, running = network.check_ports(load(PORT=str(server), GRPC_PORT=str(port)))
        (alone,) = network.check_ports(load(PORT="0", GRPC_PORT=str(port)))
    assert (running.state, running.text) == ("ok", f"{port} on 127.0.0.1 is probably used by that server")
    assert alone.state == "fail"
    assert "choose another with --grpc-port" in alone.advice


def test_the_hub_is_asked_unless_offline(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer is one; without it, stored models still load."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server}")
    assert find(network.check_hub).text.endswith("answers with 404")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    away = find(network.check_hub)
    with HTTPServer(("127.0.0.1", 0), NoHttp) as odd, serve_in_thread(odd):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{odd.server_port}")
        assert find(network.check_hub).state == "warn"
    assert away.state == "warn"
    assert "HF_ENDPOINT" in away.advice
    assert find(network.check_hub, load(OFFLINE="1")).state == "ok"


OFFERS = {
    "m": ServedModel(name="m", addresses=(Address(scheme="triton", target="h:1", model="m"),)),
    "odd": "its inputs are of no known kind",
}


@pytest.mark.parametrize(
    ("address", "offers", "state", "text"),
    [
        ("triton://h:1#m", OFFERS, "ok", "answers, with m"),
        ("triton://h:1#odd", OFFERS, "fail", "no known kind"),
        ("triton://h:1#gone", OFFERS, "fail", "no such model (it has: m, odd)"),
        ("triton://h:1", OFFERS, "warn", "no known kind"),
        ("triton://h:1", {"m": OFFERS["m"]}, "ok", "answers, with m"),
        ("triton://h:1", {}, "warn", "without a model"),
        ("triton://h:1", TransportFailed("Triton is not reachable"), "fail", "Triton is not reachable"),
    ],
)
def test_each_server_is_asked_for_its_models(
    address: str,
    offers: dict[str, ServedModel | str] | TransportFailed,
    state: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The named model must be there; a server that is down is a failure."""

    async def list_offers(loaded: LoadedConfig, asked: Address, timeout_s: float) -> dict[str, ServedModel | str]:
        assert asked == parse_address(address)
        if isinstance(offers, TransportFailed):
            raise offers
        return offers

    monkeypatch.setattr("shoal.app.probe.list_offers", list_offers)
    finding = find(network.check_backends, load(address))
    assert finding.state == state
    assert text in finding.text


def test_a_triton_that_loads_models_may_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton_url` is asked as well."""

    async def list_offers(*_: object) -> dict[str, ServedModel | str]:
        return {}

    monkeypatch.setattr("shoal.app.probe.list_offers", list_offers)
    found = [*network.check_backends(load(TRITON_URL="h:1", DEFAULT_MODEL="false"))]
    assert [(each.state, each.text) for each in found] == [("ok", "triton://h:1 answers")]


def test_models_of_files_are_looked_for_in_the_store(tmp_path: Path) -> None:
    """The first start would download them, which `offline` forbids."""
    home = str(tmp_path / "home")
    assert find(network.check_backends, load("org/name", HOME=home)).state == "warn"
    assert find(network.check_backends, load("org/name", HOME=home, OFFLINE="1")).state == "fail"
    assert find(network.check_backends, load("fake:", HOME=home)).state == "ok"
    assert "not a known scheme" in find(network.check_backends, load("foo://x", HOME=home)).text


def test_long_words_stay_whole() -> None:
    """An address can be copied from a narrow terminal."""
    address = "triton://a-very-long-host-name.example.org:8001#model"
    lines = Finding("backend", "fail", f"{address} is away", "start it").lines(60)
    assert lines[0] == f"backend     {address}"
    assert [line.strip() for line in lines[1:]] == ["is away", "-> start it"]


def test_json_has_every_check_and_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 unless something is broken."""
    environ = {"SHOAL_HOME": str(tmp_path / "home"), "SHOAL_OFFLINE": "1", "SHOAL_PORT": "0"}
    result = CliRunner().invoke(app, ["doctor", "fake:", "--json"], env=environ)
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report
    assert report["ok"]
    assert {"settings", "python", "disk", "hub", "backend"} <= {each["name"] for each in report["checks"]}
    (tmp_path / "shoal.toml").write_text("prot = 1\n")
    result = CliRunner().invoke(app, ["doctor", "fake:", "--json"], env=environ)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checks"][0]["advice"] == "did you mean port?"


def test_a_check_that_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its earlier findings and the other checks stay in the report."""

    def broken(_: LoadedConfig) -> Iterator[Finding]:
        yield Finding("gpu", "ok", "one")
        raise ValueError("odd driver")

    monkeypatch.setitem(CHECKS, "gpu", broken)
    environ = {"SHOAL_OFFLINE": "1", "SHOAL_PORT": "0"}
    result = CliRunner().invoke(app, ["doctor", "fake:", "--json"], env=environ)
    assert result.exit_code == 1
    checks = json.loads(result.stdout)["checks"]
    assert [(each["state"], each["text"]) for each in checks if each["name"] == "gpu"] == [
        ("ok", "one"),
        ("fail", "cannot be checked: ValueError: odd driver"),
    ]
    assert [each["name"] for each in checks][-2:] == ["hub", "backend"]
