"""Files of CLIP and SigLIP models: supported settings and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer, normalizers, processors

from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import has_towers, read_towers
from shoal.specs import ContrastSpec, ImageSpec, TextSpec
from tests.unit.models.checkpoints import checkpoint, write_json
from tests.unit.models.tower_checkpoints import (
    CONTEXT,
    FAMILIES,
    IMAGE_HIDDEN,
    MEAN,
    SIZE,
    STD,
    WORDS,
    tensors,
    tokenizer,
    towers,
)

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class TestClip:
    def test_the_specs(self, tmp_path: Path) -> None:
        model = read_towers(towers(tmp_path))
        assert model.family == "clip"
        assert model.dimension == 8
        assert model.text.activation == model.image.activation == "quick_gelu"
        assert model.text.eos_id == len(WORDS["clip"]) - 1
        assert model.image.patches == 4
        assert model.text_spec == TextSpec(
            tokenizer="tokenizer.json",
            inputs=("input_ids",),
            dimension=8,
            max_tokens=CONTEXT,
            vocab_size=len(WORDS["clip"]),
            pooling="eos",
            sentence_embedding="text_embeds",
            pooled="text_embeds",
            ends_normalized=False,
        )
        assert model.image_spec == ImageSpec(
            size=(SIZE, SIZE),
            dimension=8,
            resize="shortest",
            edge=SIZE,
            crop=(SIZE, SIZE),
            mean=(0.1, 0.2, 0.3),
            std=(0.4, 0.5, 0.6),
        )
        scoring = read_contrast(tmp_path, model)
        assert scoring.scale == pytest.approx(100.0)
        assert (scoring.bias, scoring.activation) == (0.0, "softmax")

    def test_missing_values_follow_transformers_defaults(self, tmp_path: Path) -> None:
        towers(tmp_path)
        write_json(tmp_path / "config.json", {"model_type": "clip"})
        write_json(tmp_path / "preprocessor_config.json", {})
        words = {f"w{place}": place for place in range(49406)} | {"<start>": 49406, "<end>": 49407}
        data = json.loads((tmp_path / "tokenizer.json").read_text())
        data["model"]["vocab"], data["added_tokens"] = words, []
        data["post_processor"]["special_tokens"] = {
            token: {"id": token, "ids": [words[token]], "tokens": [token]} for token in ("<start>", "<end>")
        }
        write_json(tmp_path / "tokenizer.json", data)
        model = read_towers(tmp_path)
        text, image = model.text, model.image
        assert (text.hidden, text.heads, text.layers, text.intermediate, text.max_positions) == (512, 8, 12, 2048, 77)
        assert (image.hidden, image.heads, image.layers, image.intermediate) == (768, 12, 12, 3072)
        assert (image.size, image.patch, model.dimension) == (224, 32, 512)
        assert (text.eos_id, text.norm_eps, model.text_spec.max_tokens) == (49407, 1e-5, 77)
        spec = model.image_spec
        assert (spec.mean, spec.std) == (OPENAI_MEAN, OPENAI_STD)
        assert (spec.resize, spec.edge, spec.crop, spec.resample, spec.rescale) == (
            "shortest",
            224,
            (224, 224),
            3,
            1 / 255,
        )

    def test_older_files_state_a_tower_twice(self, tmp_path: Path) -> None:
        """text_config_dict takes precedence with all its defaults, even over values of text_config."""
        size = len(WORDS["clip"])
        old = {"hidden_size": 24, "num_attention_heads": 3, "vocab_size": size, "eos_token_id": size - 1}
        model = read_towers(towers(tmp_path, config={"text_config_dict": old}))
        assert (model.text.hidden, model.text.heads) == (24, 3)
        assert (model.text.max_positions, model.text.layers) == (77, 12)
        assert model.image.hidden == IMAGE_HIDDEN

    def test_the_end_of_text_that_was_stated_wrongly(self, tmp_path: Path) -> None:
        assert read_towers(towers(tmp_path, text={"eos_token_id": 2})).text.eos_id is None

    def test_a_text_must_end_where_it_is_read(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: post_processor: .* end in the token 5"):
            read_towers(towers(tmp_path, text={"eos_token_id": 5}))

    def test_padding_never_looks_like_the_end(self, tmp_path: Path) -> None:
        towers(tmp_path, text={"eos_token_id": 0})
        tiny_tokenizer = tokenizer("clip")
        tiny_tokenizer.post_processor = processors.TemplateProcessing(
            single="<start> $A a", special_tokens=[("<start>", 28), ("a", 0)]
        )
        tiny_tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert read_towers(tmp_path).text_spec.pad_id == 1


class TestSiglip:
    def test_the_specs(self, tmp_path: Path) -> None:
        """The pad token is the tokenizer's; the configuration's default, 1, is the end of text here."""
        model = read_towers(towers(tmp_path, "siglip", settings={"model_max_length": 9}))
        assert (model.family, model.dimension, model.text.eos_id) == ("siglip", IMAGE_HIDDEN, None)
        assert model.text.activation == "gelu_tanh"
        spec = model.text_spec
        assert (spec.max_tokens, spec.pad_to, spec.pad_id) == (9, 9, 0)
        assert (spec.lower_case, spec.cleaning, spec.pooling) == (True, "", "last")
        assert model.image_spec == ImageSpec(
            size=(SIZE, SIZE), dimension=IMAGE_HIDDEN, resize="squash", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
        )
        scoring = read_contrast(tmp_path, model)
        assert scoring == ContrastSpec(scale=scoring.scale, bias=-12.5, activation="sigmoid")
        assert scoring.scale == pytest.approx(10.0)

    def test_without_a_stated_length_the_positions_are_filled(self, tmp_path: Path) -> None:
        assert read_towers(towers(tmp_path, "siglip")).text_spec.pad_to == CONTEXT

    @pytest.mark.parametrize("stated", ["z", {"content": "z", "lstrip": False}])
    def test_the_pad_token_is_text_or_an_object(self, tmp_path: Path, stated: Any) -> None:
        spec = read_towers(towers(tmp_path, "siglip", settings={"pad_token": stated})).text_spec
        assert spec.pad_id == WORDS["siglip"].index("z")

    def test_the_pad_token_of_the_older_file_and_of_the_class(self, tmp_path: Path) -> None:
        towers(tmp_path, "siglip", settings={"pad_token": None})
        assert read_towers(tmp_path).text_spec.pad_id == 0
        write_json(tmp_path / "special_tokens_map.json", {"pad_token": "b"})
        assert read_towers(tmp_path).text_spec.pad_id == WORDS["siglip"].index("b")

    def test_siglips_own_tokenizer_cleans_texts_in_python(self, tmp_path: Path) -> None:
        """Unless its tokenizer.json does so."""
        changes = {"tokenizer_class": "SiglipTokenizer", "pad_token": "<eos>", "padding_side": None}
        spec = read_towers(towers(tmp_path, "siglip", settings=changes)).text_spec
        assert (spec.lower_case, spec.cleaning, spec.pad_id) == (True, "canonical", 1)
        tiny_tokenizer = tokenizer("siglip")
        tiny_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(",", "")])
        tiny_tokenizer.save(str(tmp_path / "tokenizer.json"))
        spec = read_towers(tmp_path).text_spec
        assert (spec.lower_case, spec.cleaning) == (False, "")

    def test_case_is_kept_where_the_files_say_so(self, tmp_path: Path) -> None:
        assert not read_towers(towers(tmp_path, "siglip", settings={"do_lower_case": False})).text_spec.lower_case

    @pytest.mark.parametrize("side", ["left", None])
    def test_padding_on_the_left_is_refused(self, tmp_path: Path, side: str | None) -> None:
        """transformers' default for Gemma's tokenizer."""
        with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: padding_side: .*set"):
            read_towers(towers(tmp_path, "siglip", settings={"padding_side": side}))

    @pytest.mark.parametrize(("key", "value"), [("add_eos_token", False), ("add_bos_token", True)])
    def test_a_frame_that_the_two_files_disagree_on_is_refused(self, tmp_path: Path, key: str, value: bool) -> None:
        read_towers(towers(tmp_path, "siglip", settings={key: not value}))
        with pytest.raises(ModelFileError, match=rf"tokenizer_config\.json: {key}: tokenizer\.json differs"):
            read_towers(towers(tmp_path, "siglip", settings={key: value}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "siglip2"}, "model_type: 'siglip2' accepts images of any shape"),
        (
            {"model_type": "jina_clip", "auto_map": {}},
            "model_type: 'jina_clip' has towers of its own, which Shoal does not build; use ",
        ),
        ({"model_type": "qwen2_5_vl"}, "model_type: 'qwen2_5_vl' is a language model that sees, without towers; use "),
        (
            {"model_type": "altclip"},
            "model_type: 'altclip' is not supported as an image tower: Shoal builds clip and siglip",
        ),
        ({"model_type": "clip_text_model"}, "model_type: 'clip_text_model' is only the text tower"),
        ({"model_type": None}, "model_type: is missing"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["CLIPTextModelWithProjection"]}, "architectures"),
        ({"text_config": []}, "text_config"),
        ({"projection_dim": 0}, "projection_dim"),
    ],
)
def test_a_configuration_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError) as raised:
        read_towers(towers(tmp_path, config=changes))
    assert str(raised.value).startswith(f"config.json: {key}")


@pytest.mark.parametrize(
    ("family", "part", "changes"),
    [
        ("clip", "text", {"hidden_act": "mish"}),
        ("clip", "text", {"num_attention_heads": 5}),
        ("clip", "text", {"eos_token_id": [1, 2]}),
        ("clip", "text", {"eos_token_id": 99}),
        ("clip", "vision", {"num_channels": 4}),
        ("clip", "vision", {"patch_size": 11}),
        ("clip", "vision", {"image_size": [10, 10]}),
        ("siglip", "vision", {"vision_use_head": False}),
        ("siglip", "text", {"projection_size": 6}),
    ],
)
def test_a_tower_is_refused(tmp_path: Path, family: str, part: str, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(ModelFileError, match=rf"^config\.json: {part}_config\.{key}: "):
        read_towers(towers(tmp_path, family, **{part: changes}))


PROCESSORS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("clip", {"size": {"shortest_edge": 12}}, {"edge": 12}),
    ("clip", {"size": {"height": SIZE, "width": SIZE}}, {"resize": "squash", "edge": 0, "crop": None}),
    ("clip", {"size": [SIZE, SIZE], "do_center_crop": False}, {"resize": "squash", "edge": 0, "crop": None}),
    ("clip", {"do_resize": False}, {"resize": "", "edge": 0}),
    ("clip", {"crop_size": {"height": SIZE, "width": SIZE}, "do_convert_rgb": False}, {}),
    ("clip", {"do_rescale": False}, {"rescale": 1.0}),
    ("clip", {"rescale_factor": 0.5, "resample": 2}, {"rescale": 0.5, "resample": 2}),
    ("clip", {"do_normalize": False}, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}),
    ("clip", {"feature_extractor_type": None, "image_processor_type": "CLIPImageProcessorFast", "device": None}, {}),
    ("clip", {"do_pad": False, "processor_class": "CLIPProcessor"}, {}),
    ("siglip", {"size": SIZE, "do_center_crop": True, "crop_size": SIZE}, {"resize": "shortest", "edge": SIZE}),
]


@pytest.mark.parametrize(("family", "changes", "expected"), PROCESSORS)
def test_how_images_are_prepared(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec = read_towers(towers(tmp_path, family, processor=changes)).image_spec
    base: dict[str, Any] = {"resize": "shortest", "edge": SIZE, "crop": (SIZE, SIZE), "resample": 3, "rescale": 1 / 255}
    base |= {"mean": tuple(MEAN), "std": tuple(STD)}
    assert {key: getattr(spec, key) for key in base} == base | expected
    assert spec.size == (SIZE, SIZE)


def test_the_one_file_of_newer_processors_is_read(tmp_path: Path) -> None:
    towers(tmp_path)
    inner = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    write_json(tmp_path / "processor_config.json", {"image_processor": inner, "processor_class": "CLIPProcessor"})
    assert read_towers(tmp_path).image_spec.mean == tuple(MEAN)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"preprocessor_config\.json: is missing"):
        read_towers(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("clip", {"size": {"shortest_edge": 9, "longest_edge": 20}}, "size"),
        ("clip", {"size": {"height": 9, "width": 9}}, "size"),
        ("clip", {"size": {"height": 9}}, "size"),
        ("clip", {"size": "large"}, "size"),
        ("clip", {"size": 0}, "size"),
        ("clip", {"crop_size": 9}, "crop_size"),
        ("clip", {"crop_size": [True, 10]}, "crop_size"),
        ("clip", {"do_center_crop": False}, "do_center_crop"),
        ("siglip", {"do_resize": False}, "do_center_crop"),
        ("clip", {"resample": 6}, "resample"),
        ("clip", {"rescale_factor": 0}, "rescale_factor"),
        ("clip", {"image_mean": [0.1, 0.2]}, "image_mean"),
        ("clip", {"image_std": [0.1, 0.2, 0.0]}, "image_std"),
        ("clip", {"image_std": 0.5}, "image_std"),
        ("clip", {"do_normalize": "yes"}, "do_normalize"),
        ("clip", {"do_convert_rgb": 1}, "do_convert_rgb"),
        ("clip", {"do_pad": True}, "do_pad"),
        ("clip", {"auto_map": {"AutoImageProcessor": "x.Y"}}, "auto_map"),
        ("clip", {"sharpen": 3}, "sharpen"),
        ("clip", {"feature_extractor_type": "ViTFeatureExtractor"}, "feature_extractor_type"),
        ("siglip", {"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type"),
    ],
)
def test_a_processor_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"^preprocessor_config\.json: {key}: "):
        read_towers(towers(tmp_path, family, processor=changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "tokenizer_class"),
        ({"auto_map": {"AutoTokenizer": "x.Y"}}, "auto_map"),
        ({"pad_token": "<none>"}, "pad_token"),
        ({"model_max_length": 0.5}, "model_max_length"),
        ({"model_max_length": 1}, "model_max_length"),
    ],
)
def test_a_tokenizers_settings_are_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"^tokenizer_config\.json: {key}: "):
        read_towers(towers(tmp_path, "siglip", settings=changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: model\.vocab: "):
        read_towers(towers(tmp_path, family, text={"vocab_size": 20, "eos_token_id": 3}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: the tokenizer cannot be read"):
        read_towers(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: is missing.*(save_pretrained|merges\.txt)"):
        read_towers(tmp_path)


@pytest.mark.parametrize("scale", [np.zeros(2, np.float32), np.array([1], np.int64), np.array(1e9, np.float32), None])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, scale: Any) -> None:
    model = read_towers(towers(tmp_path))
    stored = {name: value for name, value in tensors("clip").items() if name != "logit_scale"}
    save_file(stored | ({} if scale is None else {"logit_scale": scale}), tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"^model\.safetensors: logit_scale: "):
        read_contrast(tmp_path, model)


def test_which_folders_hold_two_towers(tmp_path: Path) -> None:
    assert not has_towers(tmp_path)
    assert not has_towers(checkpoint(tmp_path / "bert"))
    assert has_towers(towers(tmp_path / "clip"))
    assert has_towers(towers(tmp_path / "naflex", config={"model_type": "siglip2"}))
    assert has_towers(towers(tmp_path / "other", config={"model_type": "altclip"}))
    with pytest.raises(ModelFileError, match=r"^config\.json: is missing"):
        read_towers(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["size", "crop_size", "do_resize", "do_center_crop", "resample", "image_mean", "image_std", "rescale_factor"]


@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), family=st.sampled_from(FAMILIES))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_processor_is_read_or_refused(tmp_path: Path, changes: dict[str, Any], family: str) -> None:
    try:
        spec = read_towers(towers(tmp_path, family, processor=changes)).image_spec
    except ModelFileError as error:
        assert error.file == "preprocessor_config.json"
    else:
        assert spec.size == (SIZE, SIZE)
        assert spec.resize == "squash" or spec.crop == (SIZE, SIZE)
        assert min(spec.std) > 0


def test_the_stored_tokenizer_is_used(tmp_path: Path) -> None:
    """Padding inside the file decides on nothing: the frame is read without it."""
    towers(tmp_path, "siglip", settings={"add_eos_token": True})
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).padding is not None
    assert read_towers(tmp_path).text_spec.max_tokens == CONTEXT
