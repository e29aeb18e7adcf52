"""`shoal ps`, `load`, `unload` and `rm --url` against a real `shoal serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.server_kit import Server, ShoalServer, environment


def shoal(server: Server, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in its own process, with the server's port as its setting."""
    command = [sys.executable, "-m", "shoal", *arguments]
    env = environment({"SHOAL_PORT": str(server.port), **environ})
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=server.log.parent, check=False)


def listed(server: Server, *flags: str, **environ: str) -> dict[str, dict[str, Any]]:
    """Return the models of `shoal ps --json` by name."""
    result = shoal(server, "ps", "--json", *flags, **environ)
    assert result.returncode == 0, result.stderr
    return {one["name"]: one for one in json.loads(result.stdout)}


def configure_model(folder: Path, name: str) -> None:
    """Configure a model of eight numbers by this name for servers in `folder`, so that clients may load it."""
    (folder / "shoal.toml").write_text(f'[models."{name}"]\nbackends = ["fake:dimension=8"]\n')


def done(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_model_comes_and_goes(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """A model is loaded beside the first one, listed, used and unloaded; repeating a step prints a note and
    succeeds."""
    configure_model(tmp_path, "second")
    server = shoal_server(["fake:"])
    assert done(shoal(server, "load", "second")) == "second is loaded\n"
    assert done(shoal(server, "load", "second")) == "second is already loaded\n"
    status, _, body = server.request("POST", "/v1/embeddings", {"model": "second", "input": "Hello"})
    assert (status, len(json.loads(body)["data"][0]["embedding"])) == (200, 8)
    models = listed(server)
    assert {name: one["status"] for name, one in models.items()} == {"fake": "loaded", "second": "loaded"}
    assert models["second"]["last_used"] > 0
    assert done(shoal(server, "unload", "second")) == "second is unloaded\n"
    assert done(shoal(server, "unload", "second")) == "second is not loaded\n"
    refused = shoal(server, "unload", "nobody")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "'nobody' does not exist" in refused.stderr
    assert set(listed(server)) == {"fake"}


def test_a_server_that_started_with_nothing(shoal_server: ShoalServer) -> None:
    """It is ready, prints the next step, and loads by name; only the operator may load a scripted model."""
    server = shoal_server([], "--no-default-model")
    assert listed(server) == {}
    assert f"shoal load NAME --url {server.base_url}" in server.log.read_text()
    refused = shoal(server, "load", "fake:labels=30000000")
    assert refused.returncode == 1
    assert "fake: only the operator may use addresses" in refused.stderr
    assert listed(server) == {}


def test_refusals_are_one_line(shoal_server: ShoalServer) -> None:
    """An invalid name, a folder and an unknown model each fail with one line; the server keeps serving."""
    server = shoal_server(["fake:"])
    for name in ("..", "a/../../b", "file:/etc", "fake:labels=30000000", "x" * 300, "sse"):
        for verb in ("load", "unload"):
            result = shoal(server, verb, name)
            assert result.returncode == 1, (verb, name, result.stdout)
            assert len(result.stderr.splitlines()) == 1, result.stderr
            assert "Traceback" not in result.stderr
    result = shoal(server, "rm", "not-there", "--url", server.base_url)
    assert result.returncode == 1
    assert "not-there" in result.stderr
    assert set(listed(server)) == {"fake"}


def test_an_admin_key_is_required(shoal_server: ShoalServer, tmp_path: Path) -> None:
    """The API key lists models; loading requires the admin key, which the command reads from its settings."""
    keys = {"SHOAL_API_KEY": "user", "SHOAL_ADMIN_KEY": "boss"}
    configure_model(tmp_path, "second")
    server = shoal_server(["fake:"], env=keys)
    assert set(listed(server, SHOAL_API_KEY="user")) == {"fake"}
    refused = shoal(server, "load", "second", SHOAL_API_KEY="user")
    assert refused.returncode == 1
    assert "answered 403" in refused.stderr
    assert "answered 401" in shoal(server, "ps").stderr
    assert done(shoal(server, "load", "second", **keys)) == "second is loaded\n"
