"""The hub: its real client against a local server."""

from __future__ import annotations

import inspect
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.errors
import pytest

from shoal.backends import parse_address
from shoal.errors import Cancelled, NotAtSource, SourceAway, SourceError
from shoal.models.address import Address
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access, fetch
from shoal.models.sources import hub as hub_source
from shoal.models.sources.access import FetchJob

if TYPE_CHECKING:
    from tests.unit.models.conftest import Hub, Recorder

TINY = parse_address("org/tiny")


@pytest.fixture(autouse=True)
def own_hub_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests see neither the user's token nor cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_exactly_the_needed_files_arrive(
    hub: Hub, tmp_path: Path, model_files: dict[str, bytes], recorder: Recorder
) -> None:
    """The loader's files come from one commit, nothing else is requested, and the client leaves no files behind."""
    fetched = fetch(TINY, tmp_path / "into", access=Access(hub=hub.url), progress=recorder)
    assert written(tmp_path / "into") == model_files
    assert fetched.address.revision == "4c2a" * 10
    assert str(fetched.address) == "hf:org/tiny@" + "4c2a" * 10
    assert fetched.hashes.keys() == {"model.safetensors"}
    total = sum(map(len, model_files.values()))
    assert recorder.bytes[-1] == ("hf:org/tiny", total, total)
    assert {path.rpartition("/")[2] for path in hub.paths} - {"tiny"} == {
        name.rpartition("/")[2] for name in model_files
    }
    assert not (tmp_path / "hub-cache").exists()


def test_the_client_reports_nothing_about_this_machine(hub: Hub, tmp_path: Path) -> None:
    """Requests use the model's own paths, name Shoal, and carry neither telemetry nor a token."""
    fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))
    assert all(path.startswith(("/api/models/org/tiny", "/org/tiny/resolve/")) for path in hub.paths)
    assert all(agent.startswith("shoal/") and "torch" not in agent and "agent/" not in agent for agent in hub.agents)
    assert set(hub.tokens) == {None}


def test_the_token_is_sent_where_one_is_set(hub: Hub, tmp_path: Path) -> None:
    """The hub gets the token, and the repr of the access object does not show it."""
    access = Access(hub=hub.url, hf_token="hf_secret")
    fetch(TINY, tmp_path / "into", access=access)
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert "hf_secret" not in repr(access)


def test_a_revision_is_fetched_by_name(hub: Hub, tmp_path: Path) -> None:
    """The listing uses the revision; files then come from the commit it resolved to."""
    fetch(parse_address("org/tiny@v1"), tmp_path / "into", access=Access(hub=hub.url))
    assert "/api/models/org/tiny/revision/v1" in hub.paths
    assert f"/org/tiny/resolve/{'4c2a' * 10}/config.json" in hub.paths


@pytest.mark.parametrize(
    ("status", "headers", "message", "kind"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, "no such model", NotAtSource),
        (401, {"X-Error-Code": "RepoNotFound"}, "SHOAL_HF_TOKEN", NotAtSource),
        (403, {"X-Error-Code": "GatedRepo"}, "accept its terms", SourceError),
        (404, {"X-Error-Code": "RevisionNotFound"}, "after the '@'", NotAtSource),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled", SourceError),
        (403, {}, "refused the request", SourceError),
        (429, {}, "429", SourceAway),
        (400, {}, "answered 400", SourceError),
        (500, {}, "answered 500", SourceAway),
    ],
)
def test_refusals_of_the_hub(
    hub: Hub, tmp_path: Path, status: int, headers: dict[str, str], message: str, kind: type[SourceError]
) -> None:
    """Each refusal becomes one sentence with the next step and the person who must take it."""
    hub.answers["/api/models"] = (status, headers)
    with pytest.raises(SourceError) as caught:
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))
    assert type(caught.value) is kind
    assert message in caught.value.message
    assert caught.value.message.startswith("hf:org/tiny: ")


def test_a_hub_that_is_not_there(index: Access, tmp_path: Path) -> None:
    """A closed port is a network problem."""
    with pytest.raises(SourceAway, match=r"cannot be reached.*check the network"):
        fetch(TINY, tmp_path / "into", access=index)


def test_a_silent_hub_costs_the_patience_and_no_more(tmp_path: Path) -> None:
    """A server that accepts and never responds times out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = Access(hub=f"http://127.0.0.1:{silent.getsockname()[1]}")
        job = FetchJob(TINY, tmp_path, access, Progress(), Stop(), patience=0.3)
        with pytest.raises(SourceError, match="cannot be reached"):
            hub_source.fetch(job)


def test_a_damaged_file_is_noticed(hub: Hub, tmp_path: Path) -> None:
    """Weights whose hash is not what the hub lists are refused."""
    hub.damaged = True
    with pytest.raises(SourceError, match=r"model\.safetensors is corrupt after the download"):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))


def test_a_model_of_other_formats_is_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    """Only the listing of a model without weights that Shoal reads is fetched."""
    hub.files = {"config.json": b"{}", "tf_model.h5": b"x"}
    with pytest.raises(SourceError, match=r"hf:org/tiny: there are no safetensors"):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))
    assert hub.paths == ["/api/models/org/tiny"]


def test_a_download_stops_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    """A request to stop takes effect at the next chunk, not at the end of the model."""
    stop = Stop()

    class Stopping(Progress):
        def report_fetch(self, what: str, done: int, total: int | None) -> None:
            stop.set()

    with pytest.raises(Cancelled):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url), progress=Stopping(), stop=stop)
    assert sum("resolve" in path for path in hub.paths) <= 4


def test_offline_sends_no_request(hub: Hub, tmp_path: Path) -> None:
    """With `offline` set, a model outside of the store is refused without a request."""
    with pytest.raises(SourceError, match="offline"):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url, offline=True))
    assert hub.paths == []


def _errors() -> list[type[Exception]]:
    error_classes = vars(huggingface_hub.errors).values()
    return [one for one in error_classes if inspect.isclass(one) and issubclass(one, Exception)]


@pytest.mark.parametrize("kind", _errors(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_client_has_a_translation(kind: type[Exception]) -> None:
    """Every error class of the client becomes a SourceError that names the address."""
    error = kind.__new__(kind)
    response: Any = type("Response", (), {"status_code": 418})()
    error.__dict__["response"] = response
    translated = hub_source._translate(error, Address(scheme="hf", target="org/tiny"))
    assert isinstance(translated, SourceError)
    assert translated.message.startswith("hf:org/tiny: ")
