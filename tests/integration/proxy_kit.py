"""Runs the committed configurations of nginx and Caddy, each with the real program and TLS.

Only ports, paths and the certificate are replaced.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.integration.llm_kit import free_port
from tests.integration.server_kit import Server, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PACKAGES = {"nginx": "nginx-light", "caddy": "caddy", "openssl": "openssl"}
SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

NGINX = """
{user} daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  include {folder}/shoal.conf;
}}
"""
CADDY = """
{{
  admin off
  auto_https disable_redirects
}}
{site}
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy with TLS on `port`; `plain` is its port without, 0 if it has none here. `grpc_port`: Shoal's."""

    name: str
    port: int
    plain: int
    certificate: Path
    server: Server
    grpc_port: int = 8001

    @property
    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.tls, timeout=60)

    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=DefaultHttpxClient(verify=self.tls)
        )

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def program(name: str) -> str:
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {PACKAGES[name]}")
    return found


def replaced(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, f"the configuration no longer has {old!r}"
        text = text.replace(old, new)
    return text


def nginx_command(proxy: Proxy, folder: Path) -> list[str]:
    changes = {
        "listen 80;": f"listen 127.0.0.1:{proxy.plain};",
        "listen [::]:80;": "",
        "listen 443 ssl": f"listen 127.0.0.1:{proxy.port} ssl",
        "listen [::]:443 ssl http2;": "",
        "server 127.0.0.1:8080;": f"server 127.0.0.1:{proxy.server.port};",
        "server 127.0.0.1:8001;": f"server 127.0.0.1:{proxy.grpc_port};",
        "/etc/ssl/certs/shoal.example.org.pem": str(proxy.certificate),
        "/etc/ssl/private/shoal.example.org.key": str(proxy.certificate.with_suffix(".key")),
        "/var/log/nginx/shoal.log": f"{folder}/access.log",
    }
    (folder / "shoal.conf").write_text(replaced((DEPLOY / "nginx" / "shoal.conf").read_text(), changes))
    user = "user root;" if os.geteuid() == 0 else ""  # its workers could not open the files of the tests otherwise
    (folder / "nginx.conf").write_text(NGINX.format(user=user, folder=folder))
    return [program("nginx"), "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def caddy_command(proxy: Proxy, folder: Path) -> list[str]:
    changes = {
        "\nshoal.example.org {": f"\nlocalhost:{proxy.port} {{\n\tbind 127.0.0.1\n"
        f"\ttls {proxy.certificate} {proxy.certificate.with_suffix('.key')}",
        "127.0.0.1:8080": f"127.0.0.1:{proxy.server.port}",
        "127.0.0.1:8001": f"127.0.0.1:{proxy.grpc_port}",
        "/var/log/caddy/shoal.log": f"{folder}/access.log",
    }
    site = replaced((DEPLOY / "caddy" / "Caddyfile").read_text(), changes)
    (folder / "Caddyfile").write_text(CADDY.format(site=site))
    return [program("caddy"), "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


COMMANDS: dict[str, Callable[[Proxy, Path], list[str]]] = {"nginx": nginx_command, "caddy": caddy_command}


@contextmanager
def proxying(name: str, server: Server, folder: Path, *, grpc_port: int = 8001) -> Iterator[Proxy]:
    """Run nginx or Caddy before a server, with a new certificate. Skips the test where the program is not installed."""
    plain = free_port() if name == "nginx" else 0
    found = Proxy(name, free_port(), plain, make_certificate(folder), server, grpc_port)
    command = COMMANDS[name](found, folder)
    log = folder / "output.log"
    environ = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environ)
    try:
        wait_until(found.listens, process, log)
        yield found
    finally:
        process.terminate()
        process.wait(timeout=30)


def make_certificate(folder: Path) -> Path:
    """Return a certificate for localhost; its key is beside it."""
    file = folder / "localhost.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1"]
    files = ["-out", str(file), "-keyout", str(file.with_suffix(".key"))]
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, *files],
        check=True,
        capture_output=True,
    )
    return file
