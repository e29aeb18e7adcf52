"""The configuration, the alerts and the dashboard under deploy/, against promtool and a real Prometheus."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.integration.llm_kit import running
from tests.integration.server_kit import PATIENCE_S, Server

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "shoal.json"
VARIABLES = {"$__rate_interval": "5s", "$instance": ".*", "$model": ".*"}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed: apt-get install prometheus",
)


def expressions() -> dict[str, str]:
    """Return every expression of the dashboard, with values for its variables, by panel and legend."""
    found: dict[str, str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            assert "$" not in text
            found[f"{panel['title']}: {target['legendFormat']}"] = text
    return found


def test_the_dashboard_is_that_of_its_table() -> None:
    rendered = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))["render"]()
    assert DASHBOARD.read_text() == rendered, "run `python deploy/grafana/dashboard.py`"


def test_metrics_of_alerts_and_panels_are_documented() -> None:
    documented = set(re.findall(r"`(shoal_\w+)`", (DEPLOY.parent / "docs" / "metrics.md").read_text()))
    used = re.findall(r"shoal_\w+", " ".join(expressions().values()) + (PROMETHEUS / "shoal.rules.yml").read_text())
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert names <= documented


@needs_prometheus
@pytest.mark.parametrize(
    "arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "shoal.rules.test.yml")]
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@contextmanager
def prometheus(folder: Path, server: Server) -> Iterator[str]:
    """Run a Prometheus with the configuration of deploy/, which scrapes `server` every second; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    configuration = (PROMETHEUS / "prometheus.yml").read_text().replace("15s", "1s")
    (folder / "prometheus.yml").write_text(configuration.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"))
    shutil.copy(PROMETHEUS / "shoal.rules.yml", folder)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def ask(url: str, path: str) -> Any:
    """Return the data of an answer of Prometheus; None while it starts."""
    with suppress(URLError), urlopen(f"{url}/api/v1/{path}", timeout=PATIENCE_S) as reply:
        return json.load(reply)["data"]
    return None


def send_load(server: Server, number: int) -> None:
    """Send what makes every metric count: good requests, bad ones, a failing engine, chats, cached inputs."""
    embedding = {"model": "fake", "input": [f"text {number} {at}" for at in range(4)] + ["the same"]}
    assert server.request("POST", "/v1/embeddings", embedding)[0] == 200
    assert server.request("POST", "/v1/embeddings", {"model": "fake", "input": "poison-item"})[0] == 500
    assert server.request("POST", "/v1/embeddings", {"model": "fake", "input": 5})[0] == 400
    assert server.request("POST", "/v1/embeddings", {"model": "nothing", "input": "a"})[0] == 404
    chat = {"model": "fake", "messages": [{"role": "user", "content": "one two three four"}]}
    assert server.request("POST", "/v1/chat/completions", chat)[0] == 200


@needs_prometheus
def test_every_panel_has_data(tmp_path: Path) -> None:
    """A real Prometheus scrapes a real server under load: each expression returns a number, and all rules work."""
    with running(tmp_path / "shoal", "fake:", flags=("--cache-mb", "1")) as server, prometheus(tmp_path, server) as url:
        missing = expressions()
        end = time.monotonic() + PATIENCE_S
        number = 0
        while missing:
            assert time.monotonic() < end, f"no data for {missing}; {(tmp_path / 'prometheus.log').read_text()[-2000:]}"
            send_load(server, number := number + 1)
            found = {name: ask(url, f"query?query={quote(text)}") for name, text in missing.items()}
            missing = {
                name: missing[name] for name, data in found.items() if not data or not has_number(data["result"])
            }
            time.sleep(0.5)
        assert [each["health"] for each in ask(url, "targets")["activeTargets"]] == ["up"]
        (group,) = ask(url, "rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}


def has_number(result: list[dict[str, Any]]) -> bool:
    return any(each["value"][1] != "NaN" for each in result)
