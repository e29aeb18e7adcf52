"""Client for a running `shoal serve`, which shows the progress of long jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from shoal.cli._asking import ServerClient, first_key
from shoal.config.settings import Settings
from shoal.errors import ConfigError, SetupError, TransportFailed
from shoal.models.progress import Progress

CONNECTION_SETTINGS = ("port", "host", "api_key", "api_key_file", "admin_key", "admin_key_file")
"""What a command needs to reach the server and to manage it."""

REQUEST_TIMEOUT_S = 60.0
"""Timeout per request; no endpoint used here waits for a model."""

POLL_S = 0.2
"""Interval between job polls: short enough for a smooth progress bar."""


class RunningServer:
    """The admin API of the server at `url`.

    Every call raises TransportFailed if no such server answers at `url`, and SetupError with the server's own reason if
    it rejects the request.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self._server = ServerClient(url, key, patience_s=timeout_s)
        self.url = self._server.url

    @classmethod
    def from_settings(cls, settings: Settings, url: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> RunningServer:
        """Connect to `url`, or else to the server that `shoal serve` starts with these settings, with their key.

        Raises ConfigError if there is no URL and the port is 0.
        """
        if not url and not settings.port:
            raise ConfigError("port 0 does not identify the server: use --url", param="--url")
        from shoal.cli.banner import browser_url as url_of

        place = url or url_of(settings.host, settings.port)
        return cls(place, first_key(*settings.admin_key, *settings.api_key), timeout_s=timeout_s)

    def models(self) -> list[dict[str, Any]]:
        """Return every model that the server knows, served or not, as GET /models lists them."""
        found = self._server.ask("/models").get("data")
        if not isinstance(found, list):
            raise TransportFailed(f"{self.url} lists no models: is it a Shoal server?")
        return found

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return the record of one of the last requests."""
        return self._server.ask(f"/v1/requests/{quote(request_id, safe='')}")

    def get_last_used(self) -> Mapping[str, float]:
        """Return when each model last answered, in Unix seconds by name. Models that never answered are missing.

        Triton's names have ~ where model names have a slash.
        """
        stats = self._server.ask("/metrics").get("model_stats")
        latest: dict[str, float] = {}
        for each in stats if isinstance(stats, list) else ():
            used = int(each.get("last_inference") or 0) / 1000
            name = str(each["name"]).replace("~", "/")
            if used:
                latest[name] = max(used, latest.get(name, 0.0))
        return latest

    def load(self, name: str, options: Mapping[str, Any], progress: Progress) -> bool:
        """Load a model. Returns False if it was already loaded. Raises SetupError with the reason if it cannot be
        loaded."""
        return self._run_job("POST", f"/v1/models/{quote(name, safe='/:@=')}/load", options, progress)

    def unload(self, name: str, progress: Progress) -> bool:
        """Unload a model. Returns False if it was not loaded."""
        return self._run_job("POST", f"/v1/models/{quote(name, safe='/:@=')}/unload", {}, progress)

    def delete(self, name: str, progress: Progress) -> bool:
        """Unload a model and delete its files. Returns False if there was nothing to delete."""
        return self._run_job("DELETE", f"/v1/models/{quote(name, safe='/:@=')}", None, progress)

    def _run_job(self, method: str, path: str, body: Mapping[str, Any] | None, progress: Progress) -> bool:
        job = self._server.ask(f"{path}?wait=false", body, method=method)
        if "job" not in job:
            raise TransportFailed(f"{self.url} did not start a job: is it a Shoal server of this version?")
        last_stage = ""
        try:
            while job["state"] == "running":
                last_stage = _show(job, last_stage, progress)
                time.sleep(POLL_S)
                job = self._server.ask(f"/jobs/{quote(job['job'], safe='')}")
        except KeyboardInterrupt:
            progress.report_note("the server continues the job: `shoal ps` shows its progress")
            raise
        if job["state"] != "done":
            raise SetupError(job.get("error") or f"{job['action']} of {job['model']} was {job['state']}")
        return job.get("changed") is not False


def check_model_name(name: str) -> str:
    """Return `name` for use in a path. Raises SetupError if it is empty or begins with a slash, which is another
    path."""
    if not name.strip("/") or name.startswith("/"):
        raise SetupError(f"{name!r} is not a model: `shoal ps --all` lists them")
    return name


def _show(job: Mapping[str, Any], last_stage: str, progress: Progress) -> str:
    """Draw a job's progress and return its stage. A stage without a measure is printed once."""
    stage = job.get("stage") or ""
    if stage and job.get("done") is not None:
        progress.report_fetch(stage, int(job["done"]), None if job.get("total") is None else int(job["total"]))
    elif stage and job.get("progress") is not None:
        progress.report_work(stage, job["progress"])
    elif stage and stage != last_stage:
        progress.report_note(stage)
    return stage
