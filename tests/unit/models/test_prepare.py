"""From an address to a stored model."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shoal.backends import parse_address
from shoal.errors import AddressError, Cancelled, SourceError, VerificationFailed
from shoal.models import prepare as preparing
from shoal.models.address import Address
from shoal.models.convert.verify import Verification
from shoal.models.manifest import Verdict, check_files
from shoal.models.prepare import prepare
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.specs import TextSpec

if TYPE_CHECKING:
    from tests.unit.models.conftest import Hub, Recorder

TINY = parse_address("org/tiny")


@pytest.fixture
def local(model_folder: Path) -> Address:
    return parse_address(f"file:{model_folder}")


def test_a_model_is_fetched_converted_and_stored(
    hub: Hub, store: Store, conversions: list[Path], recorder: Recorder
) -> None:
    """The manifest says where the model came from, how it was made and what every file hashes to."""
    stored = prepare(TINY, store=store, access=Access(hub=hub.url), progress=recorder)
    manifest = stored.manifest
    assert (manifest.id, manifest.address) == ("org/tiny", "hf:org/tiny")
    assert manifest.source == f"hf:org/tiny@{manifest.revision}"
    assert (manifest.graph, manifest.graph_source, manifest.parameters) == ("model.onnx", "built", 2560)
    assert stored.tokenizer.read_bytes() == b'{"version": "1.0"}'
    assert "source/1_Pooling/config.json" in manifest.files
    assert manifest.weights == {"model.safetensors": manifest.files["source/model.safetensors"].sha256}
    assert check_files(stored.path, manifest, full=True) == []
    assert ("convert", 1.0) in recorder.steps


def test_what_is_stored_needs_no_network(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """The second time the store answers: no request, no conversion, also offline."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    before = len(hub.paths)
    assert prepare(TINY, store=store, access=Access(hub=hub.url, offline=True)) == first
    assert len(hub.paths) == before
    assert len(conversions) == 1


def test_offline_without_the_model(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """Offline, a model that is not stored is refused, and no trace of the attempt stays."""
    with pytest.raises(SourceError, match="offline"):
        prepare(TINY, store=store, access=Access(hub=hub.url, offline=True))
    assert list((store.home / "models").iterdir()) == []


def test_offline_with_a_damaged_model(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """That there was one, and what is wrong with it, is said beside that it cannot be fetched."""
    stored = prepare(TINY, store=store, access=Access(hub=hub.url))
    stored.tokenizer.unlink()
    message = (
        r"^hf:org/tiny in the store is corrupt \(.*tokenizer\.json.*\) and is not used; the store has no usable "
        r".*`offline`"
    )
    with pytest.raises(SourceError, match=message):
        prepare(TINY, store=store, access=Access(hub=hub.url, offline=True))


def test_refresh_fetches_anew(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """With `refresh` the model is fetched although it is there, and the old answer goes."""
    prepare(TINY, store=store, access=Access(hub=hub.url))
    hub.files["config.json"] = b'{"model_type": "roberta"}'
    stored = prepare(TINY, store=store, access=Access(hub=hub.url), refresh=True)
    assert (stored.path / "source" / "config.json").read_bytes() == hub.files["config.json"]
    assert store.entries() == [stored]


def test_a_failed_refresh_keeps_what_was_there(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """When the source fails, the stored model goes on to answer."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    hub.answers["/api/models"] = (500, {})
    with pytest.raises(SourceError):
        prepare(TINY, store=store, access=Access(hub=hub.url), refresh=True)
    assert store.find(TINY) == first


def test_a_damaged_model_is_fetched_anew(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """A file that was cut is noticed and the model is made again."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    first.graph.write_bytes(b"")
    assert prepare(TINY, store=store, access=Access(hub=hub.url)).graph.stat().st_size > 0
    assert len(conversions) == 2


def test_damage_is_reported_once(
    hub: Hub, store: Store, conversions: list[Path], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error when nothing else can be had, else by one note that it was made anew; never by the log as well."""
    access = Access(hub=hub.url)
    prepare(TINY, store=store, access=access).tokenizer.unlink()
    with pytest.raises(SourceError) as caught:
        prepare(TINY, store=store, access=Access(offline=True), progress=recorder)
    assert caught.value.message.count("is corrupt") == 1
    assert (recorder.lines, caplog.records) == ([], [])
    prepare(TINY, store=store, access=access, progress=recorder)
    (line,) = recorder.lines
    assert line.startswith("hf:org/tiny in the store is corrupt (")
    assert line.endswith("is not used: rebuilt")
    assert caplog.records == []


def test_a_newer_converter_needs_no_network(
    hub: Hub, store: Store, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older conversion made is made anew of the files that were kept."""
    prepare(TINY, store=store, access=Access(hub=hub.url))
    monkeypatch.setattr(preparing, "CONVERTER", 99)
    stored = prepare(TINY, store=store, access=Access(offline=True))
    assert stored.manifest.converter == 99
    assert stored.manifest.source.startswith("hf:org/tiny@4c2a")
    assert check_files(stored.path, stored.manifest, full=True) == []
    assert store.entries() == [stored]


def test_a_folder_is_converted_once_for_its_content(local: Address, store: Store, conversions: list[Path]) -> None:
    """A local folder's files are not copied; when one changes, the model is converted anew and replaces the old."""
    first = prepare(local, store=store)
    assert prepare(local, store=store) == first
    assert not (first.path / "source").exists()
    assert first.manifest.weights.keys() == {"model.safetensors"}
    os.utime(Path(local.target) / "config.json", ns=(1, 1))
    second = prepare(local, store=store)
    assert len(conversions) == 2
    assert store.entries() == [second]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace the comparison by one that answers what this list says, a verdict a call."""
    coming: list[bool] = []

    def verify(source: Path, contract: object, target: Path, spec: TextSpec, run: Any) -> Verification:
        assert run == (target / "model.onnx").read_bytes()
        assert (target / spec.tokenizer).is_file()
        assert (source / "config.json").is_file()
        return Verification(
            passed=coming.pop(0), min_cosine=0.999999, max_abs_diff=1e-6, method="reference", text="as it should be"
        )

    monkeypatch.setattr("shoal.models.convert.verify.verify", verify)
    return coming


def open_graph(path: Path) -> Any:
    """Stands for an engine: what it opened is the file's content."""
    return path.read_bytes()


def test_the_verdict_is_recorded(local: Address, store: Store, conversions: list[Path], verdicts: list[bool]) -> None:
    """Verification sees the converted files before they are stored, once, and its outcome is kept."""
    verdicts.append(True)
    stored = prepare(local, store=store, engine=open_graph)
    assert stored.manifest.verification == Verdict("as it should be", 0.999999)
    assert prepare(local, store=store, engine=open_graph) == stored


def test_what_was_pulled_unverified_is_verified_later(
    hub: Hub, store: Store, conversions: list[Path], verdicts: list[bool]
) -> None:
    """A model that was stored without an engine is verified with the first one, without network."""
    assert prepare(TINY, store=store, access=Access(hub=hub.url)).manifest.verification is None
    verdicts.append(True)
    stored = prepare(TINY, store=store, access=Access(offline=True), engine=open_graph)
    assert stored.manifest.verification is not None
    assert store.entries() == [stored]


def test_a_model_that_fails_verification_is_not_stored(
    local: Address, store: Store, conversions: list[Path], verdicts: list[bool]
) -> None:
    """What disagrees with its second path never reaches the store."""
    verdicts.append(False)
    with pytest.raises(VerificationFailed):
        prepare(local, store=store, engine=open_graph)
    assert store.entries() == []


def test_two_who_want_one_model_fetch_it_once(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """Whoever comes second waits and takes what the first one brought."""
    found: list[Path] = []

    def want() -> None:
        found.append(prepare(TINY, store=Store(store.home), access=Access(hub=hub.url)).path)

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(conversions) == 1


def test_a_conversion_can_be_stopped(local: Address, store: Store, conversions: list[Path]) -> None:
    """A stop is noticed at the conversion's next step, and nothing is stored."""
    stop = Stop()

    class Stopping(Progress):
        def report_work(self, stage: str, fraction: float) -> None:
            stop.set()

    with pytest.raises(Cancelled):
        prepare(local, store=store, progress=Stopping(), stop=stop)
    assert store.entries() == []


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EROFS, "SHOAL_HOME")]
)
def test_errors_of_the_disk(
    local: Address, store: Store, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    """A disk that is full or cannot be written is reported with the next step."""

    def convert(folder: Path, target: Path, *, progress: object) -> object:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr("shoal.models.convert.convert.convert", convert)
    with pytest.raises(SourceError, match=message):
        prepare(local, store=store)


def test_remote_addresses_are_refused(store: Store) -> None:
    """There is nothing to prepare of a model on another server."""
    with pytest.raises(AddressError, match="serve it instead"):
        prepare(parse_address("triton://h:1#m"), store=store)
