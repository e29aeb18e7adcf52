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


def refuse_links(*_: object, **__: object) -> None:
    """As file systems without hard links do."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.fixture
def local(model_folder: Path) -> Address:
    return parse_address(f"file:{model_folder}")


def test_a_model_is_fetched_converted_and_stored(
    hub: Hub, store: Store, conversions: list[Path], recorder: Recorder
) -> None:
    """The manifest has the source, the conversion and the hash of every file."""
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


def test_stored_models_need_no_network(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """The second call uses the store: no request, no conversion, also offline."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    before = len(hub.paths)
    assert prepare(TINY, store=store, access=Access(hub=hub.url, offline=True)) == first
    assert len(hub.paths) == before
    assert len(conversions) == 1


def test_offline_without_the_model(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """Offline, a model outside of the store is refused, and no files of the attempt remain."""
    with pytest.raises(SourceError, match="offline"):
        prepare(TINY, store=store, access=Access(hub=hub.url, offline=True))
    assert list((store.home / "models").iterdir()) == []


def test_offline_with_a_damaged_model(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """The error reports the damage and that the model cannot be fetched."""
    stored = prepare(TINY, store=store, access=Access(hub=hub.url))
    stored.tokenizer.unlink()
    message = (
        r"^hf:org/tiny in the store is corrupt \(.*tokenizer\.json.*\) and is not used; the store has no usable "
        r".*`offline`"
    )
    with pytest.raises(SourceError, match=message):
        prepare(TINY, store=store, access=Access(hub=hub.url, offline=True))


def test_refresh_fetches_anew(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """With `refresh` the model is fetched again and replaces the stored one."""
    prepare(TINY, store=store, access=Access(hub=hub.url))
    hub.files["config.json"] = b'{"model_type": "roberta"}'
    stored = prepare(TINY, store=store, access=Access(hub=hub.url), refresh=True)
    assert (stored.path / "source" / "config.json").read_bytes() == hub.files["config.json"]
    assert store.entries() == [stored]


def test_a_failed_refresh_keeps_the_stored_model(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """If the source fails, the stored model stays."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    hub.answers["/api/models"] = (500, {})
    with pytest.raises(SourceError):
        prepare(TINY, store=store, access=Access(hub=hub.url), refresh=True)
    assert store.find(TINY) == first


def test_a_damaged_model_is_fetched_anew(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """A truncated file is detected and the model is prepared again."""
    first = prepare(TINY, store=store, access=Access(hub=hub.url))
    first.graph.write_bytes(b"")
    assert prepare(TINY, store=store, access=Access(hub=hub.url)).graph.stat().st_size > 0
    assert len(conversions) == 2


def test_damage_is_reported_once(
    hub: Hub, store: Store, conversions: list[Path], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error if the model cannot be prepared again, else by one note; never by the log as well."""
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


@pytest.mark.parametrize("links", [True, False])
def test_a_newer_converter_needs_no_network(
    links: bool, hub: Hub, store: Store, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output of an older converter is converted again from the stored source files, linked or copied."""
    prepare(TINY, store=store, access=Access(hub=hub.url))
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr(preparing, "CONVERTER", 99)
    stored = prepare(TINY, store=store, access=Access(offline=True))
    assert stored.manifest.converter == 99
    assert stored.manifest.source.startswith("hf:org/tiny@4c2a")
    assert check_files(stored.path, stored.manifest, full=True) == []
    assert store.entries() == [stored]


def test_a_full_disk_during_the_copy(
    hub: Hub, store: Store, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links, the stored source files need their space twice for a while."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    prepare(TINY, store=store, access=Access(hub=hub.url))
    monkeypatch.setattr(preparing, "CONVERTER", 99)
    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr("shutil.copyfile", fill)
    with pytest.raises(SourceError, match="disk is full"):
        prepare(TINY, store=store, access=Access(offline=True))


def test_a_folder_is_converted_once_for_its_content(local: Address, store: Store, conversions: list[Path]) -> None:
    """A local folder is not copied; a changed folder is converted again and replaces the old entry."""
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
    """Replace the comparison by one that returns these results, one per call."""
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
    """Replaces an engine: returns the file's content."""
    return path.read_bytes()


def test_the_verdict_is_recorded(local: Address, store: Store, conversions: list[Path], verdicts: list[bool]) -> None:
    """The converted files are verified once before they are stored, and the result is kept."""
    verdicts.append(True)
    stored = prepare(local, store=store, engine=open_graph)
    assert stored.manifest.verification == Verdict("as it should be", 0.999999)
    assert prepare(local, store=store, engine=open_graph) == stored


def test_unverified_models_are_verified_later(
    hub: Hub, store: Store, conversions: list[Path], verdicts: list[bool]
) -> None:
    """A model stored without an engine is verified with the first one, without network."""
    assert prepare(TINY, store=store, access=Access(hub=hub.url)).manifest.verification is None
    verdicts.append(True)
    stored = prepare(TINY, store=store, access=Access(offline=True), engine=open_graph)
    assert stored.manifest.verification is not None
    assert store.entries() == [stored]


def test_a_model_that_fails_verification_is_not_stored(
    local: Address, store: Store, conversions: list[Path], verdicts: list[bool]
) -> None:
    """A graph that disagrees with the reference is never stored."""
    verdicts.append(False)
    with pytest.raises(VerificationFailed):
        prepare(local, store=store, engine=open_graph)
    assert store.entries() == []


def test_concurrent_callers_fetch_a_model_once(hub: Hub, store: Store, conversions: list[Path]) -> None:
    """The second caller waits and uses the first one's result."""
    folders: list[Path] = []

    def want() -> None:
        folders.append(prepare(TINY, store=Store(store.home), access=Access(hub=hub.url)).path)

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert len(conversions) == 1


def test_a_conversion_can_be_stopped(local: Address, store: Store, conversions: list[Path]) -> None:
    """It stops at its next step, and nothing is stored."""
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
    """A full or read-only disk is reported with the next step."""

    def convert(folder: Path, target: Path, *, progress: object) -> object:
        raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr("shoal.models.convert.convert.convert", convert)
    with pytest.raises(SourceError, match=message):
        prepare(local, store=store)


def test_remote_addresses_are_refused(store: Store) -> None:
    """A model on another server needs no preparation."""
    with pytest.raises(AddressError, match="serve it instead"):
        prepare(parse_address("triton://h:1#m"), store=store)
