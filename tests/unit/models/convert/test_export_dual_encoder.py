"""The export process of dual encoders, as its caller sees it. No PyTorch here: tests/convert has the models."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from shoal.errors import Cancelled, MissingExtra, ModelFileError, VerificationFailed
from shoal.models.convert import export_dual_encoder as module
from shoal.models.convert.export import Line
from shoal.models.convert.export_dual_encoder import ExportedTowers, can_export_towers, export_towers, library_of
from shoal.models.manifest import Verdict
from shoal.models.progress import Stop
from shoal.specs import ContrastSpec, ImageSpec, ScoreSpec, TextSpec
from tests.unit.models.checkpoints import write_json

DONE = ExportedTowers(
    library="open_clip",
    graph="model.onnx",
    text=TextSpec(tokenizer="tokenizer.json", inputs=("input_ids",), dimension=8, max_tokens=77, pad_to=77),
    text_verification=Verdict("fine", 1.0),
    image_graph="image.onnx",
    image=ImageSpec(
        size=(32, 32), dimension=0, edge=36, crop=(32, 32), score=ScoreSpec(labels=("a", "b"), activation="softmax")
    ),
    contrast=ContrastSpec(scale=100.0, bias=-10.0, activation="sigmoid"),
    files=("model.onnx", "image.onnx", "tokenizer.json"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "model/open_clip_config.json", {"model_cfg": {}})
    return tmp_path / "model"


def set_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Sets the program that replaces the exporter."""
    monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-c", f"import sys, time\n{program}"))
    monkeypatch.setattr(module, "can_export_towers", lambda: True)


def test_the_outcome_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All specs are returned unchanged; the process gets the folders and the model's library."""
    line = msgspec.json.encode(Line(done=DONE)).decode()
    set_program(
        monkeypatch,
        "assert sys.argv[3] == 'open_clip' and sys.argv[1].endswith('model') and sys.argv[2].endswith('into')\n"
        f"""print('{{"stage": "export", "fraction": 0.5}}')\nprint({line!r})""",
    )
    reports: list[tuple[str, float]] = []
    exported = export_towers(folder, folder.parent / "into", progress=lambda stage, at: reports.append((stage, at)))
    assert exported == DONE
    assert reports == [("export", 0.5)]
    assert exported.words == "exported by PyTorch from open_clip"


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("""print('{"error": "no", "kind": "model_file"}')""", ModelFileError, r"open_clip_config\.json: no"),
        ("""print('{"error": "differs", "kind": "verification"}')""", VerificationFailed, "differs"),
        ("sys.exit('out of luck')", ModelFileError, r"ended with 1 \(out of luck\).*pull it on a larger machine"),
        ("time.sleep(60)", ModelFileError, r"more than 0 s; allow more, or pull it"),
        ("held = b'x' * (300 << 20)\ntime.sleep(60)", ModelFileError, "more than 200 MiB"),
    ],
)
def test_its_errors_and_bounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, kind: type[Exception], message: str
) -> None:
    set_program(monkeypatch, program)
    time_s = 0.2 if "0 s" in message else 60
    with pytest.raises(kind, match=message):
        export_towers(folder, folder, max_memory_mb=200, timeout_s=time_s)


def test_it_can_be_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_program(monkeypatch, """print('{"stage": "load"}', flush=True)\ntime.sleep(60)""")
    stop = Stop()
    with pytest.raises(Cancelled):
        export_towers(folder, folder, stop=stop, progress=lambda *_: stop.set())


def test_whose_model_it_is(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of transformers and other folders are refused before the process starts."""
    set_program(monkeypatch, "raise SystemExit('it ran')")
    assert library_of(folder) == "open_clip"
    write_json(tmp_path / "timm/config.json", {"architecture": "resnet18", "num_classes": 3})
    assert library_of(tmp_path / "timm") == "timm"
    for config in ({"model_type": "clip", "architecture": "x"}, {"architectures": ["CLIPModel"]}):
        write_json(tmp_path / "other/config.json", config)
        assert library_of(tmp_path / "other") is None
    with pytest.raises(ModelFileError, match="neither library"):
        export_towers(tmp_path / "other", tmp_path)
    assert library_of(tmp_path / "nothing") is None


def test_without_the_extra_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in module.PACKAGES:
        monkeypatch.setattr(module, "find_spec", lambda name, absent=absent: None if name == absent else object())
        assert not can_export_towers()
        with pytest.raises(MissingExtra, match=r"\[convert-images\]"):
            export_towers(folder, folder)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert can_export_towers()
