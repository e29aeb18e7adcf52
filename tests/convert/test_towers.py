"""Models of open_clip and timm, exported in the process, against the libraries themselves: from texts and images to
vectors and scores, through what Shoal serves them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image as Pillow
from tokenizers import Tokenizer

from shoal.errors import ModelFileError
from shoal.models.convert.export_dual_encoder import ExportedTowers, export_towers
from shoal.models.convert.verify import min_cosine
from shoal.pipelines.image.pixels import decode
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.types import Array
from tests.convert.models import CASES, open_clip_folder, timm_folder, weights
from tests.unit.models.engines import RUNS
from tests.unit.pipelines.image.image_kit import drawn, saved

# Ignore warnings of the reference libraries; importing them takes seconds in every process.
pytestmark = [pytest.mark.convert, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TEXTS = ["a", "two CATS on  a mat, asleep!", "it's a_photo; of (42) dogs. " * 3, "Été à Zürich", "!?"]
FREE = {"vit", "convnext", "eva"}
SIZES = ((64, 64), (90, 64), (300, 204), (64, 130), (17, 23), (400, 200), (99, 330), (250, 256))


class Export(NamedTuple):
    folder: Path
    into: Path
    found: ExportedTowers


def export_into(folder: Path, into: Path, **options: Any) -> ExportedTowers:
    into.mkdir()
    return export_towers(folder, into, **options)


@pytest.fixture(scope="module", params=CASES)
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    place = tmp_path_factory.mktemp(request.param)
    folder = open_clip_folder(request.param, place / request.param)
    reports: list[str] = []
    found = export_into(folder, place / "into", progress=lambda stage, _: reports.append(stage))
    assert list(dict.fromkeys(reports)) == ["read", "load", "export"]
    return Export(folder, place / "into", found)


def encode(export: Export, texts: list[str]) -> Array:
    """Return ids padded as the text pipeline pads them."""
    spec = export.found.text
    assert spec is not None
    tokenizer = Tokenizer.from_file(str(export.into / spec.tokenizer))
    tokenizer.enable_truncation(spec.max_tokens)
    rows = [each.ids for each in tokenizer.encode_batch(texts)]
    ids = np.full((len(rows), max(spec.pad_to, *map(len, rows))), spec.pad_id, np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids


def close(got: Array, right: Array) -> None:
    assert min_cosine(got, right) >= 0.9999
    assert np.abs(got - right).max() <= 1e-3 * np.abs(right).max()


def test_texts_and_images_embed_as_in_open_clip(export: Export) -> None:
    """On both engines, in batches and alone, a text over the context's length among them."""
    import open_clip
    import torch

    name = f"local-dir:{export.folder}"
    model, _, transform = open_clip.create_model_and_transforms(name)
    model = model.eval()
    found, tokenizer = export.found, open_clip.get_tokenizer(name)
    files = [saved(drawn(*size), "PNG") for size in SIZES]
    steps = Preprocessing(found.image)
    pixels = np.stack([steps.values(steps.pixels(data)) for data in files])
    with torch.inference_mode():
        texts = model.encode_text(tokenizer(TEXTS), normalize=False).numpy()
        seen = torch.stack([transform(Pillow.fromarray(decode(data))) for data in files])
        images = model.encode_image(seen, normalize=False).numpy()
    for open_run in RUNS.values():
        run = open_run(export.into / found.graph)
        close(run({"input_ids": encode(export, TEXTS)}, ("text_embeds",))["text_embeds"], texts)
        alone = [run({"input_ids": encode(export, [text])}, ("text_embeds",))["text_embeds"] for text in TEXTS]
        close(np.concatenate(alone), texts)
        run = open_run(export.into / found.image_graph)
        close(run({"pixel_values": pixels}, ("image_embeds",))["image_embeds"], images)
        close(run({"pixel_values": pixels[:1]}, ("image_embeds",))["image_embeds"], images[:1])


def test_specs_state_the_model_facts(export: Export) -> None:
    found, name = export.found, export.folder.name
    assert found.library == "open_clip"
    assert (
        set(found.files)
        == {path.name for path in export.into.iterdir()}
        == {"model.onnx", "image.onnx", "tokenizer.json"}
    )
    assert found.text is not None
    assert found.text_verification is not None and "agrees" in found.text_verification.text
    assert found.image_verification is not None and found.image_verification.min_cosine >= 0.9999
    assert found.text.pad_to == (0 if name in FREE else found.text.max_tokens)
    assert found.text.dimension == found.image.dimension == 24
    assert found.contrast is not None
    assert found.contrast.scale == pytest.approx(1 / 0.07, rel=1e-4)
    assert (found.contrast.bias, found.contrast.activation) == (
        (-10, "sigmoid") if name == "siglip" else (0, "softmax")
    )


CLASSIFIERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "imagenet": ("mobilenetv3_small_050", {}, {}),
    "named": ("test_vit", {"num_classes": 3}, {"label_names": ["cat", "dog", "cow"]}),
    "described": (
        "test_convnext",
        {"num_classes": 2},
        {"label_names": ["n1", "n2"], "label_descriptions": {"n1": "a ship", "n2": "a fish"}},
    ),
    "unnamed": ("test_resnet", {"num_classes": 2}, {}),
    "features": ("test_efficientnet", {"num_classes": 0}, {}),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_models_of_timm(case: str, tmp_path: Path) -> None:
    """Scores, or vectors of a feature extractor, of images as timm's own transform prepares them."""
    import timm
    import torch

    name, options, config = CLASSIFIERS[case]
    folder = timm_folder(name, tmp_path / "model", config=config, **options)
    found = export_into(folder, tmp_path / "into")
    assert (found.library, found.graph, found.text, found.contrast) == ("timm", "", None, None)
    assert found.files == ("image.onnx",)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    files = [saved(drawn(width * 4, height * 4), "PNG") for width, height in SIZES[:1]]
    steps = Preprocessing(found.image)
    pixels = np.stack([steps.values(steps.pixels(data)) for data in files])
    seen = torch.stack([transform(Pillow.fromarray(decode(data))) for data in files])
    np.testing.assert_allclose(pixels, seen.numpy(), atol=1e-5)
    with torch.inference_mode():
        right = model(seen).numpy()
    for open_run in RUNS.values():
        close(
            open_run(tmp_path / "into/image.onnx")({"pixel_values": pixels}, (found.image.output,))[found.image.output],
            right,
        )
    score = found.image.score
    if case == "features":
        assert score is None
        assert (found.image.output, found.image.dimension) == ("image_embeds", right.shape[1])
        return
    assert score is not None
    assert (score.activation, score.output, found.image.dimension) == ("softmax", "logits", 0)
    assert len(score.labels) == right.shape[1] == len(set(score.labels))
    labels = {
        "imagenet": "tench, Tinca tinca", "named": "cat", "described": "a ship", "unnamed": "LABEL_0",
    }  # fmt: skip
    assert score.labels[0] == labels[case]


def change_json(folder: Path, path: str, value: Any, file: str = "open_clip_config.json") -> None:
    data = json.loads((folder / file).read_text())
    place = data
    *parents, last = path.split(".")
    for each in parents:
        place = place.setdefault(each, {})
    place[last] = value
    (folder / file).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("preprocess_cfg.resize_mode", "longest", r"preprocess_cfg\.resize_mode: 'longest' is not supported"),
        ("model_cfg.text_cfg.hf_model_name", "xlm-roberta-base", "another repository's settings, 'xlm-roberta-base'"),
        ("model_cfg.text_cfg.tokenizer_mode", "clips", "'clips' is not supported"),
        (
            "model_cfg.text_cfg.tokenizer_kwargs",
            {"trust_remote_code": True},
            "trust_remote_code: True is not supported",
        ),
        ("model_cfg.vision_cfg.timm_model_name", "hf-hub:evil/model", "'hf-hub:evil/model' is another repository"),
        ("model_cfg.vision_cfg.layers", 3, "PyTorch cannot export this model .*Missing key"),
        ("model_cfg.vision_cfg.surprise", 3, "PyTorch cannot export this model .*surprise"),
    ],
)
def test_invalid_open_clip_models_are_rejected(tmp_path: Path, path: str, value: Any, message: str) -> None:
    """Errors are raised before the export; weights that do not fit are never replaced by random ones."""
    folder = open_clip_folder("vit", tmp_path / "model")
    change_json(folder, path, value)
    with pytest.raises(ModelFileError, match=message):
        export_into(folder, tmp_path / "into")


def test_missing_weights_are_rejected(tmp_path: Path) -> None:
    folder = open_clip_folder("vit", tmp_path / "model")
    weights(folder).unlink()
    with pytest.raises(ModelFileError, match="could not be loaded"):
        export_into(folder, tmp_path / "into")


def test_pickled_open_clip_weights_are_read_as_tensors(tmp_path: Path) -> None:
    """The file is read as tensors only, and code in it is not run."""
    import torch
    from safetensors.torch import load_file

    folder = open_clip_folder("vit", tmp_path / "model")
    state = load_file(weights(folder))
    weights(folder).unlink()
    torch.save(
        {"state_dict": {f"module.{name}": each for name, each in state.items()}}, folder / "open_clip_pytorch_model.bin"
    )
    assert export_into(folder, tmp_path / "into").parameters > 1_000_000

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil()}, folder / "open_clip_pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"PyTorch cannot export this model .*[Ww]eights"):
        export_into(folder, tmp_path / "again")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pretrained_cfg.crop_mode", "border", r"crop_mode: 'border' is not supported"),
        ("model_args.pretrained_strict", False, r"model_args\.pretrained_strict: is not supported"),
        ("model_args.features_only", True, r"model_args\.features_only: is not supported"),
        ("model_args.num_classes", 5, "5 is not 3, the num_classes"),
        ("label_names", ["one", "two"], "2 labels do not match 3 scores"),
        ("architecture", "nothing_of_timm", "Unknown model"),
    ],
)
def test_invalid_timm_models_are_rejected(tmp_path: Path, path: str, value: Any, message: str) -> None:
    folder = timm_folder("test_resnet", tmp_path / "model", num_classes=3)
    change_json(folder, path, value, "config.json")
    with pytest.raises(ModelFileError, match=message):
        export_into(folder, tmp_path / "into")


def test_feature_maps_are_rejected(tmp_path: Path) -> None:
    folder = timm_folder("test_resnet", tmp_path / "model", num_classes=0, global_pool="")
    with pytest.raises(ModelFileError, match="neither one vector nor one score per label"):
        export_into(folder, tmp_path / "into")
