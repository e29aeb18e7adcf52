"""The Dockerfile, Compose files, systemd unit and Procfile agree with each other, the settings and the chart."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config.settings import SETTINGS, Settings
from shoal.durations import parse_duration
from shoal.http.status_codes import TABLE

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "deploy" / "docker"
UNIT = ROOT / "deploy" / "systemd" / "shoal.service"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
VARIABLES = {setting.env for setting in SETTINGS} | {"SHOAL_MODELS", "SHOAL_CONFIG", "SHOAL_AS"}
"""What Shoal reads from the environment."""
LONGEST_STOP_S = Settings().drain_delay_s + Settings().drain_timeout_s + 2


def compose(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.yaml.decode(file.read_text())
    return found


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
    parser.read(UNIT)
    return parser


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: word, arguments on one line."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def copied_files() -> list[str]:
    """Return what .dockerignore lets into an image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    return [line[1:] for line in lines if line.startswith("!")]


NOT_ALARMING = {
    *("invalid", "malformed", "wrong_type", "empty", "too_many", "too_long", "invalid_value", "unsupported"),
    *("too_large", "media_type", "unauthorized", "forbidden", "route_not_found", "method_not_allowed"),
    *("model_not_found", "job_not_found", "object_not_found", "conflict", "input_rejected", "request_timeout"),
    *("cancelled", "overloaded", "upstream"),
    *("setup", "config", "address", "source", "not_at_source", "model_file", "verification", "missing_extra"),
}
"""Kinds that ShoalErrors does not count: the caller's, those of other alerts, and those of a load."""


def test_each_kind_of_error_is_counted_by_the_alert_or_known_not_to_be() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "shoal.rules.yml").read_text()
    found = re.search(r'outcome=~"([a-z_|]+)"', rules)
    assert found is not None
    counted = found[1].split("|")
    assert len(counted) == len(set(counted))
    assert set(counted) | NOT_ALARMING == set(TABLE)
    assert not NOT_ALARMING & set(counted)


def test_only_settings_are_in_the_environment() -> None:
    """A misspelled variable would have no effect."""
    texts = [(DOCKER / name).read_text() for name in ("Dockerfile", "example.env")]
    texts += [UNIT.read_text(), *(json_of(compose(file)["services"].get("shoal", {})) for file in COMPOSE)]
    named = {name for text in texts for name in re.findall(r"\bSHOAL_[A-Z_]+", text)}
    assert named - VARIABLES == {"SHOAL_IMAGE", "SHOAL_PUBLISHED_PORT"}


def json_of(value: object) -> str:
    return msgspec.json.encode(value).decode()


def test_the_image_runs_without_rights() -> None:
    """Every final stage runs as the user of the chart's pods, which has no name that could be anything else."""
    stages = [rest.split() for word, rest in instructions() if word == "FROM"]
    bases = {name: base for base, _, name in stages}
    assert [bases[name] for name in ("cpu", "cuda", "triton")] == ["runtime"] * 3
    assert [rest for word, rest in instructions() if word == "USER"] == ["10001:10001"]
    assert stages[-1][-1] == "cpu"  # what a build without --target makes


def test_what_an_image_needs_is_sent_to_the_build() -> None:
    """.dockerignore lets in nothing by default."""
    files = copied_files()
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "requirements", "src", "web"} == set(files)
    assert [name for name in files if not (ROOT / name).exists()] == []
    wanted = re.findall(r"requirements/\S+\.txt", (DOCKER / "Dockerfile").read_text())
    assert wanted and [name for name in wanted if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_keep_ports_on_this_machine(file: Path) -> None:
    """Published ports have no TLS, so they are not for the network; nothing but them is published."""
    for service in compose(file)["services"].values():
        assert [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")] == []
        assert "network_mode" not in service
        assert not service.get("privileged")


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_say_which_variables_they_need(file: Path) -> None:
    """Every variable has a default or a message, or is required by compose.yaml, and example.env lists the required."""
    text = file.read_text()
    example = (DOCKER / "example.env").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert [name for name in required if f"\n{name}=" not in example] == []
    bare = set(re.findall(r"\$\{(\w+)\}", text))
    assert bare <= {"SHOAL_API_KEY"}


def test_prometheus_has_the_key_and_the_files() -> None:
    """compose.yaml requires a key, so /metrics does."""
    monitoring = compose(DOCKER / "compose.monitoring.yaml")
    config = msgspec.yaml.decode(monitoring["configs"]["prometheus"]["content"])
    (job,) = config["scrape_configs"]
    assert job["authorization"] == {"credentials": "${SHOAL_API_KEY}"}
    mounted = [each.split(":") for service in monitoring["services"].values() for each in service["volumes"]]
    assert f"/etc/prometheus/{config['rule_files'][0]}" in [target for _, target, *_ in mounted]
    assert [source for source, *_ in mounted if source.startswith("..") and not (DOCKER / source).exists()] == []


def test_shoal_is_confined_by_compose() -> None:
    """As in the chart: a read-only root, no capabilities, time to answer requests before it is killed."""
    service = compose(DOCKER / "compose.yaml")["services"]["shoal"]
    assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])
    assert (parse_duration(service["stop_grace_period"]) or 0) > LONGEST_STOP_S
    assert service["volumes"] == ["models:/var/lib/shoal"]


def test_the_unit_waits_for_requests_and_is_confined() -> None:
    """It outlasts the drain, can be enabled, and has none of what would break engines that compile code."""
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > LONGEST_STOP_S
    assert unit()["Install"]["WantedBy"] == "multi-user.target"
    for switch in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictNamespaces"):
        assert service[switch] == "yes"
    assert not {"MemoryDenyWriteExecute", "ProcSubset"} & set(service)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` knows every line, and the unit is exposed little."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/shoal/bin/shoal", sys.executable))  # it checks that it exists
    for command in (["verify", "--man=no"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run([program, *command, str(copy)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert UNIT.name not in done.stderr  # others' units may have faults of their own


def test_the_procfile_starts_the_server() -> None:
    """Its platform chooses the port."""
    name, _, command = (ROOT / "deploy" / "Procfile").read_text().partition(": ")
    assert (name, shlex.split(command)) == ("web", ["shoal", "serve", "--host", "0.0.0.0", "--port", "$PORT"])
