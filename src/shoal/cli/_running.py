"""A running `shoal serve`, asked over HTTP from the command line, with its long work shown as it goes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from shoal.cli._asking import ServerClient, first_key
from shoal.config.settings import Settings
from shoal.errors import ConfigError, SetupError, TransportFailed
from shoal.models.progress import Progress

REQUEST_TIMEOUT_S = 60.0
"""For one answer: none of those asked for here waits for a model."""

POLL_S = 0.2
"""Between two looks at a job: often enough for a bar that moves."""


class RunningServer:
    """A server at `url`. Every call raises TransportFailed when no such server answers there, and SetupError with the
    server's own reason when it refuses."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._server = ServerClient(url, key, patience_s=REQUEST_TIMEOUT_S)
        self.url = self._server.url

    @classmethod
    def from_settings(cls, settings: Settings, url: str) -> RunningServer:
        """The server at `url`, else the one that `shoal serve` starts with these settings; with a key of theirs."""
        if not url and not settings.port:
            raise ConfigError("port 0 says nothing about where the server is: give --url", param="--url")
        from shoal.cli.banner import browser_url as url_of

        place = url or url_of(settings.host, settings.port)
        return cls(place, first_key(*settings.admin_key, *settings.api_key))

    def models(self) -> list[dict[str, Any]]:
        """Every model that it knows, served or not, as GET /models lists them."""
        found = self._server.ask("/models").get("data")
        if not isinstance(found, list):
            raise TransportFailed(f"{self.url} lists no models: is that a Shoal server?")
        return found

    def get_last_used(self) -> Mapping[str, float]:
        """When models last answered, in Unix seconds, by name; those that never did are not in it. Triton's names have
        ~ where those of models have a slash."""
        stats = self._server.ask("/metrics").get("model_stats")
        latest: dict[str, float] = {}
        for each in stats if isinstance(stats, list) else ():
            used = int(each.get("last_inference") or 0) / 1000
            name = str(each["name"]).replace("~", "/")
            if used:
                latest[name] = max(used, latest.get(name, 0.0))
        return latest

    def load(self, name: str, options: Mapping[str, Any], progress: Progress) -> bool:
        """False: it was loaded already. Raises SetupError with the reason when it cannot be."""
        return self._run_job("POST", f"/v1/models/{quote(name, safe='/:@=')}/load", options, progress)

    def unload(self, name: str, progress: Progress) -> bool:
        """False: it was not loaded."""
        return self._run_job("POST", f"/v1/models/{quote(name, safe='/:@=')}/unload", {}, progress)

    def delete(self, name: str, progress: Progress) -> bool:
        """Unload it and delete its files. False: there was nothing."""
        return self._run_job("DELETE", f"/v1/models/{quote(name, safe='/:@=')}", None, progress)

    def _run_job(self, method: str, path: str, body: Mapping[str, Any] | None, progress: Progress) -> bool:
        job = self._server.ask(f"{path}?wait=false", body, method=method)
        if "job" not in job:
            raise TransportFailed(f"{self.url} has not begun a job: is that a Shoal server of this version?")
        said = ""
        try:
            while job["state"] == "running":
                said = _show(job, said, progress)
                time.sleep(POLL_S)
                job = self._server.ask(f"/jobs/{quote(job['job'], safe='')}")
        except KeyboardInterrupt:
            progress.report_note("the server goes on with it: `shoal ps` shows how far it is")
            raise
        if job["state"] != "done":
            raise SetupError(job.get("error") or f"{job['action']} of {job['model']} was {job['state']}")
        return job.get("changed") is not False


def check_model_name(name: str) -> str:
    """As a path holds it: what is empty or begins with a slash would be another path."""
    if not name.strip("/") or name.startswith("/"):
        raise SetupError(f"{name!r} names no model: `shoal ps --all` lists them")
    return name


def _show(job: Mapping[str, Any], said: str, progress: Progress) -> str:
    """Draw where a job stands; answers the stage, which is said once where there is nothing to measure."""
    stage = job.get("stage") or ""
    if stage and job.get("done") is not None:
        progress.report_fetch(stage, int(job["done"]), None if job.get("total") is None else int(job["total"]))
    elif stage and job.get("progress") is not None:
        progress.report_work(stage, job["progress"])
    elif stage and stage != said:
        progress.report_note(stage)
    return stage
