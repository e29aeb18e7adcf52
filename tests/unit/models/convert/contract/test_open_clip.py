"""Reading open_clip_config.json: supported settings, defaults, and errors by key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, normalizers

from shoal.errors import ModelFileError
from shoal.models.convert.contract import open_clip as reader
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.open_clip import read_open_clip, unsupported_error
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import has_towers, read_towers
from shoal.specs import ContrastSpec
from tests.unit.models.checkpoints import write_json
from tests.unit.models.open_clip_checkpoints import CONFIG, WEIGHTS, open_clip, siglip_names
from tests.unit.models.tower_checkpoints import CONTEXT, IMAGE_HIDDEN, INNER, SIZE, WORDS, tensors, tokenizer, towers

SCALE, TEN = (math.exp(float(np.float32(np.log(number)))) for number in (100.0, 10.0))


def refused(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_open_clip(folder)
    return caught.value.message


def siglip(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
) -> Path:
    """The SigLIP of `tower_checkpoints` in open_clip's layout, with timm's "base" at the same small size."""
    monkeypatch.setitem(reader._TRUNKS, "base", reader._Trunk(IMAGE_HIDDEN, 2, 2, INNER / IMAGE_HIDDEN))
    vision_cfg: dict[str, Any] = {"image_size": SIZE, "timm_model_name": f"vit_base_patch4_siglip_{SIZE}"}
    vision_cfg |= {"timm_pool": "map", "timm_proj": "none", "timm_model_pretrained": False}
    texts: dict[str, Any] = {"context_length": CONTEXT, "vocab_size": len(WORDS["siglip"])}
    texts |= {"width": 12, "heads": 2, "layers": 2}
    texts |= {"mlp_ratio": INNER / 12 + 1e-9, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    texts |= {
        "norm_kwargs": {"eps": 1e-6},
        "hf_tokenizer_name": "org/name",
        "tokenizer_kwargs": {"clean": "canonicalize"},
    }
    towers = {"vision_cfg": vision_cfg | (vision or {}), "text_cfg": texts | (text or {})}
    whole = {"embed_dim": IMAGE_HIDDEN, "init_logit_bias": -10, "custom_text": True} | towers | (model or {})
    prepared = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    write_json(folder / CONFIG, {"model_cfg": whole, "preprocess_cfg": prepared})
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "pad_token": "<pad>"} | (tokens or {})
    )
    tokenizer("siglip").save(str(folder / "tokenizer.json"))
    save_file(siglip_names(tensors("siglip")), folder / WEIGHTS)
    return folder


def test_a_clip_is_read_with_its_numbers(tmp_path: Path) -> None:
    contract = read_towers(open_clip(tmp_path))
    assert (contract.family, contract.layout, contract.dimension) == ("clip", "open_clip", 8)
    assert (contract.text.hidden, contract.text.heads, contract.text.layers, contract.text.intermediate) == (
        12,
        2,
        2,
        INNER,
    )
    assert (contract.image.hidden, contract.image.heads, contract.image.layers, contract.image.intermediate) == (
        16,
        2,
        2,
        INNER,
    )
    assert contract.text.norm_eps == contract.image.norm_eps == 1e-5
    assert contract.text.activation == contract.image.activation == "quick_gelu"
    assert contract.text.eos_id is None
    spec = contract.text_spec
    assert (spec.max_tokens, spec.pad_id, spec.pad_to, spec.pooling) == (CONTEXT, 0, 0, "eos")
    assert has_towers(tmp_path)


def test_defaults_are_those_of_open_clip(tmp_path: Path) -> None:
    """A ViT-B-16's values for an almost empty configuration; exact GELU, not its approximation."""
    sizes = dict.fromkeys(("image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size"))
    texts = dict.fromkeys(("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"))
    folder = open_clip(
        tmp_path, model={"quick_gelu": None}, vision=sizes, text=texts, preprocess={"mean": None, "std": None}
    )
    contract = read_towers(folder)
    image, text, spec = contract.image, contract.text, contract.image_spec
    assert (image.size, image.patch, image.hidden, image.heads, image.layers) == (224, 16, 768, 12, 12)
    assert (image.intermediate, image.activation) == (3072, "gelu")
    assert (text.vocab_size, text.max_positions, text.hidden, text.heads, text.layers) == (49408, 77, 512, 8, 12)
    assert (text.intermediate, text.activation) == (2048, "gelu")
    assert (spec.resize, spec.edge, spec.crop, spec.resample) == ("shortest", 224, (224, 224), 3)
    assert spec.mean == (0.48145466, 0.4578275, 0.40821073)
    assert spec.std == (0.26862954, 0.26130258, 0.27577711)


def test_sizes_are_rounded_as_there(tmp_path: Path) -> None:
    """bigG's values: 1664 * 4.9231 is 8192 and a fraction."""
    folder = open_clip(tmp_path, vision={"width": 1664, "head_width": 104, "mlp_ratio": 4.9231, "image_size": [10, 10]})
    image = read_towers(folder).image
    assert (image.heads, image.intermediate, image.size) == (16, 8192, 10)


@pytest.mark.parametrize(
    ("preprocess", "resize", "edge", "crop", "resample"),
    [
        ({}, "shortest", SIZE, (SIZE, SIZE), 3),
        ({"resize_mode": "squash", "interpolation": "bilinear"}, "squash", 0, None, 2),
        (
            {"interpolation": "random", "size": [99, 99], "mode": "RGB", "fill_color": 1},
            "shortest",
            SIZE,
            (SIZE, SIZE),
            3,
        ),
    ],
)
def test_how_images_are_prepared(
    tmp_path: Path, preprocess: dict[str, Any], resize: str, edge: int, crop: object, resample: int
) -> None:
    """The size is the tower's, whatever the other settings."""
    spec = read_towers(open_clip(tmp_path, preprocess=preprocess)).image_spec
    assert (spec.resize, spec.edge, spec.crop, spec.resample) == (resize, edge, crop, resample)
    assert (spec.size, spec.mean, spec.std) == ((SIZE, SIZE), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_colours_that_are_stated_once_or_as_nothing(tmp_path: Path) -> None:
    """open_clip reads a lone 0 as absent, and any other number for all channels."""
    spec = read_towers(open_clip(tmp_path, preprocess={"mean": 0, "std": 0.5})).image_spec
    assert (spec.mean, spec.std) == ((0.48145466, 0.4578275, 0.40821073), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("preprocess", "words"),
    [
        ({"resize_mode": "longest"}, "resize_mode: 'longest' is not supported"),
        ({"mode": "L"}, "mode: must be RGB"),
        ({"interpolation": "lanczos"}, "interpolation: 'lanczos' is not one of bicubic, bilinear, random"),
        ({"mean": [1, 2]}, "mean: must hold three numbers"),
        ({"std": [1, 2, 0]}, "std: must hold numbers above 0"),
        ({"sharpen": True}, "sharpen: unknown key"),
    ],
)
def test_images_of_another_preparation_are_refused(tmp_path: Path, preprocess: dict[str, Any], words: str) -> None:
    assert refused(open_clip(tmp_path, preprocess=preprocess)).startswith(f"{CONFIG}: preprocess_cfg.{words}")


@pytest.mark.parametrize(
    ("model", "key", "what"),
    [
        ({"multimodal_cfg": {"width": 4}}, "multimodal_cfg", "CoCa"),
        ({"audio_cfg": {"model": "x"}}, "audio_cfg", "CLAP"),
        ({"vision_cfg": {"timm_model_name": "convnext_base"}}, "vision_cfg.timm_model_name", "'convnext_base'"),
        ({"vision_cfg": {"timm_model_name": "eva02_base_patch16_clip_224"}}, "vision_cfg.timm_model_name", "'eva02_"),
        ({"vision_cfg": {"timm_model_name": "vit_base_patch16_siglip_gap_224"}}, "vision_cfg.timm_model_name", "'vit_"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3], "width": 64}}, "vision_cfg.layers", "a ResNet"),
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg.pool_type", "'avg'"),
        ({"vision_cfg": {"no_ln_pre": True}}, "vision_cfg.no_ln_pre", "True"),
        ({"vision_cfg": {"ls_init_value": 0.1}}, "vision_cfg.ls_init_value", "0.1"),
        ({"vision_cfg": {"qk_norm": True}}, "vision_cfg.qk_norm", "True"),
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "text_cfg.hf_model_name", "'roberta-base'"),
        ({"text_cfg": {"text_arch": "modern"}}, "text_cfg.text_arch", "'modern'"),
        ({"text_cfg": {"tokenizer_type": "tiktoken"}}, "text_cfg.tokenizer_type", "'tiktoken'"),
        ({"text_cfg": {"embed_cls": True}}, "text_cfg.embed_cls", "True"),
        ({"text_cfg": {"pool_type": "last"}}, "text_cfg.pool_type", "'last'"),
        ({"text_cfg": {"no_causal_mask": True}}, "text_cfg.no_causal_mask", "True"),
        ({"text_cfg": {"proj_bias": True}}, "text_cfg.proj_bias", "True"),
        (
            {"text_cfg": {"tokenizer_kwargs": {"strip_sep_token": True}}},
            "text_cfg.tokenizer_kwargs.strip_sep_token",
            "True",
        ),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, model: dict[str, Any], key: str, what: str) -> None:
    """The error states the alternative and differs from that of a broken file."""
    message = refused(open_clip(tmp_path, model=model))
    assert message.startswith(f"{CONFIG}: model_cfg.{key}: {what}")
    assert "the 'convert-images' extra" in message
    error = unsupported_error(tmp_path)
    assert error is not None
    assert error.message == message
    assert has_towers(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"embed_dim": 0}, "embed_dim: must be a whole number of at least 1"),
        ({"embed_dim": None}, "embed_dim: is missing"),
        ({"vision_cfg": None}, "vision_cfg: is missing"),
        ({"text_cfg": 5}, "text_cfg: must be an object"),
        ({"depth": 3}, "depth: unknown key, which may change the vectors"),
        ({"vision_cfg": {"depth": 3}}, "vision_cfg.depth: unknown key"),
        ({"text_cfg": {"depth": 3}}, "text_cfg.depth: unknown key"),
        ({"vision_cfg": {"width": 60}}, "vision_cfg.head_width: 64 does not divide 60"),
        ({"vision_cfg": {"image_size": [8, 16]}}, "vision_cfg.image_size: [8, 16] is not square"),
        ({"vision_cfg": {"image_size": 8}}, "vision_cfg.patch_size: 16 is larger than the image_size, 8"),
        ({"vision_cfg": {"mlp_ratio": 0.0001}}, "vision_cfg.mlp_ratio: 0.0001 is implausible"),
        ({"text_cfg": {"mlp_ratio": 1e308}}, "text_cfg.mlp_ratio: 1e+308 is implausible for 512 dimensions"),
        (
            {"vision_cfg": {"norm_kwargs": {"elementwise_affine": False}}},
            "vision_cfg.norm_kwargs.elementwise_affine: unk",
        ),
        ({"text_cfg": {"heads": 5}}, "text_cfg.heads: 5 heads do not divide 512"),
        ({"text_cfg": {"act_kwargs": {"approximate": "tanh"}}}, "text_cfg.act_kwargs: "),
        ({"text_cfg": {"pool_type": "eos"}}, "text_cfg.eos_id: is missing"),
        ({"text_cfg": {"pool_type": "eos", "eos_id": 30, "vocab_size": 30}}, "text_cfg.eos_id: 30 is outside"),
        (
            {"text_cfg": {"vocab_size": 30, "tokenizer_kwargs": {"clean": "x"}}},
            "text_cfg.tokenizer_kwargs.clean: 'x' is not",
        ),
    ],
)
def test_invalid_settings_are_refused_by_key(tmp_path: Path, model: dict[str, Any], words: str) -> None:
    assert refused(open_clip(tmp_path, model=model)).startswith(f"{CONFIG}: model_cfg.{words}")


def test_other_words_for_the_same_are_taken(tmp_path: Path) -> None:
    """An explicit end token, approximate GELU, a norm's epsilon, and training settings."""
    tanh = {"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": {"eps": 1e-6}}
    folder = open_clip(
        tmp_path,
        model={"quick_gelu": False, "custom_text": True, "init_logit_scale": 2.6},
        text={"pool_type": "eos", "eos_id": len(WORDS["clip"]) - 1, **tanh},
        vision={"patch_dropout": 0.5, "final_ln_after_pool": True, "act_kwargs": {"approximate": "none"}},
    )
    contract = read_towers(folder)
    assert (contract.text.eos_id, contract.text.activation, contract.text.norm_eps) == (29, "gelu_tanh", 1e-6)
    assert (contract.image.activation, contract.image.norm_eps) == ("gelu", 1e-5)
    assert unsupported_error(folder) is None


@pytest.mark.parametrize(
    ("text", "lowers", "lower_case", "cleaning"),
    [
        ({}, True, False, ""),
        ({}, False, True, ""),
        ({"hf_tokenizer_name": "org/name"}, False, False, ""),
        ({"tokenizer_kwargs": {"clean": "canonicalize"}}, True, False, "canonical"),
        ({"hf_tokenizer_name": "org/name", "tokenizer_kwargs": {"clean": "lower"}}, False, True, ""),
    ],
)
def test_how_texts_are_cleaned(
    tmp_path: Path, text: dict[str, Any], lowers: bool, lower_case: bool, cleaning: str
) -> None:
    """Texts are lower-cased unless the tokenizer is from transformers; `lowers`: the tokenizer does it itself."""
    folder = open_clip(tmp_path, text=text)
    if not lowers:
        tiny_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tiny_tokenizer.normalizer = normalizers.NFC()
        tiny_tokenizer.save(str(folder / "tokenizer.json"))
    spec = read_towers(folder).text_spec
    assert (spec.lower_case, spec.cleaning) == (lower_case, cleaning)


def test_the_context_is_the_models_not_the_tokenizers(tmp_path: Path) -> None:
    folder = open_clip(tmp_path)
    write_json(folder / "tokenizer_config.json", {"model_max_length": 5})
    assert read_towers(folder).text_spec.max_tokens == CONTEXT


def test_a_siglip_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = read_towers(siglip(tmp_path, monkeypatch))
    assert (contract.family, contract.layout, contract.dimension) == ("siglip", "open_clip", IMAGE_HIDDEN)
    assert (contract.image.size, contract.image.patch, contract.image.hidden, contract.image.intermediate) == (
        SIZE,
        4,
        16,
        INNER,
    )
    assert (contract.image.activation, contract.image.norm_eps) == ("gelu", 1e-6)
    assert (contract.text.activation, contract.text.norm_eps, contract.text.eos_id) == ("gelu", 1e-6, None)
    spec = contract.text_spec
    assert (spec.pad_to, spec.pad_id, spec.pooling) == (CONTEXT, 0, "last")
    assert (spec.lower_case, spec.cleaning) == (True, "canonical")
    assert (contract.image_spec.resize, contract.image_spec.crop) == ("squash", None)
    assert read_contrast(tmp_path, contract) == ContrastSpec(scale=TEN, bias=-12.5, activation="sigmoid")


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "activation"),
    [
        ("vit_base_patch16_siglip_224", 768, 3072, "gelu"),
        ("vit_base_patch32_siglip_256", 768, 3072, "gelu_tanh"),
        ("vit_large_patch16_siglip_384", 1024, 4096, "gelu"),
        ("vit_large_patch16_siglip_512", 1024, 4096, "gelu_tanh"),
        ("vit_so400m_patch14_siglip_384", 1152, 4304, "gelu"),
        ("vit_so400m_patch16_siglip_512", 1152, 4304, "gelu_tanh"),
        ("vit_giantopt_patch16_siglip_256", 1536, 6144, "gelu_tanh"),
    ],
)
def test_the_names_of_timm_stand_for_numbers(
    tmp_path: Path, name: str, hidden: int, inner: int, activation: str
) -> None:
    vision: dict[str, Any] = {
        "timm_model_name": name,
        "image_size": int(name[-3:]),
        "timm_pool": "map",
        "timm_proj": "none",
    }
    contract = reader._timm_tower(JsonFile(CONFIG, vision, "model_cfg.vision_cfg"))
    assert (contract.hidden, contract.intermediate, contract.activation) == (hidden, inner, activation)
    assert contract.size == int(name[-3:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision": {"image_size": 12}}, "vision_cfg.image_size: 12 does not match vit_base_patch4_siglip_10"),
        ({"vision": {"timm_proj": "linear"}}, "vision_cfg.timm_proj: 'linear' is not supported; Shoal builds"),
        ({"vision": {"timm_pool": "avg"}}, "vision_cfg.timm_pool: 'avg' is not supported; Shoal builds"),
        (
            {"vision": {"timm_model_kwargs": {"reg_tokens": 1}}},
            "vision_cfg.timm_model_kwargs: {'reg_tokens': 1} is not",
        ),
        ({"text": {"no_causal_mask": False}}, "text_cfg.no_causal_mask: False is not supported; Shoal builds"),
        ({"text": {"proj_bias": False}}, "text_cfg.proj_bias: False is not supported; Shoal builds"),
        ({"text": {"pool_type": "argmax"}}, "text_cfg.pool_type: 'argmax' is not supported; Shoal builds"),
        ({"model": {"embed_dim": 8}}, "embed_dim: 8 is not 16, the dimension of image vectors"),
    ],
)
def test_a_siglip_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    assert refused(siglip(tmp_path, monkeypatch, **changes)).startswith(f"{CONFIG}: model_cfg.{words}")


def test_siglips_padding_is_its_tokenizers_and_on_the_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip pads on the right whatever the files state, with their padding id."""
    stated = {"tokenizer_class": "GemmaTokenizer", "padding_side": "left", "pad_token": "<eos>", "do_lower_case": False}
    spec = read_towers(siglip(tmp_path, monkeypatch, tokens=stated)).text_spec
    assert (spec.pad_id, spec.lower_case) == (1, True)
    assert refused(siglip(tmp_path, monkeypatch, tokens={"pad_token": "<none>"})).startswith(
        "tokenizer_config.json: pad_token: '<none>' is not a token"
    )
    assert refused(siglip(tmp_path, monkeypatch, tokens={"tokenizer_class": "BertTokenizer"})).startswith(
        "tokenizer_config.json: tokenizer_class: 'BertTokenizer' is not supported; Shoal knows GemmaTokenizer, "
    )


def test_transformers_does_not_take_the_class_of_open_clip(tmp_path: Path) -> None:
    folder = towers(tmp_path, "siglip", settings={"tokenizer_class": "T5Tokenizer"})
    with pytest.raises(ModelFileError, match="'T5Tokenizer' is not supported"):
        read_towers(folder)


def test_a_clip_trained_with_sigmoids_is_compared_so(tmp_path: Path) -> None:
    folder = open_clip(tmp_path)
    contract = read_towers(folder)
    assert read_contrast(folder, contract) == ContrastSpec(scale=SCALE, bias=0.0, activation="softmax")
    stored = load_file(folder / WEIGHTS)
    biased = {"logit_scale": stored["logit_scale"].reshape(1), "logit_bias": tensors("siglip")["logit_bias"]}
    save_file(stored | biased, folder / WEIGHTS)
    assert read_contrast(folder, contract) == ContrastSpec(scale=SCALE, bias=-12.5, activation="sigmoid")


class TestBothLayouts:
    """A folder that also has transformers' files."""

    def test_transformers_weights_come_first(self, tmp_path: Path) -> None:
        assert read_towers(towers(open_clip(tmp_path))).layout == "transformers"

    @pytest.mark.parametrize("missing", ["model.safetensors", "preprocessor_config.json"])
    def test_open_clips_are_taken_where_those_are_not_whole(self, tmp_path: Path, missing: str) -> None:
        folder = towers(open_clip(tmp_path))
        (folder / missing).unlink()
        contract = read_towers(folder)
        assert (contract.layout, contract.text_spec.max_tokens) == ("open_clip", CONTEXT)

    def test_without_weights_the_error_is_that_of_transformers(self, tmp_path: Path) -> None:
        folder = towers(open_clip(tmp_path))
        for name in ("model.safetensors", WEIGHTS):
            (folder / name).unlink()
        contract = read_towers(folder)
        with pytest.raises(ModelFileError, match=r"^model\.safetensors: is missing"):
            read_contrast(folder, contract)

    def test_the_config_of_a_timm_image_tower_means_nothing(self, tmp_path: Path) -> None:
        folder = open_clip(tmp_path)
        write_json(folder / "config.json", {"architecture": "vit_base_patch32_clip_224", "num_classes": 512})
        (folder / "model.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
        assert read_towers(folder).layout == "open_clip"

    def test_a_config_that_is_no_json_is_refused(self, tmp_path: Path) -> None:
        (open_clip(tmp_path) / CONFIG).write_text("{")
        assert has_towers(tmp_path)
        with pytest.raises(ModelFileError, match=rf"^{CONFIG}: is not valid JSON"):
            read_towers(tmp_path)
        with pytest.raises(ModelFileError, match=rf"^nowhere/{CONFIG}: is missing"):
            unsupported_error(tmp_path, "nowhere")


def test_null_means_absent(tmp_path: Path) -> None:
    folder = open_clip(tmp_path)
    stored = json.loads((folder / CONFIG).read_text())
    stored["model_cfg"]["vision_cfg"] |= {"ls_init_value": None, "timm_model_name": None}
    stored["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": None, "act_kwargs": None}
    stored["preprocess_cfg"] = None
    write_json(folder / CONFIG, stored)
    assert read_towers(folder).image_spec.mean == (0.48145466, 0.4578275, 0.40821073)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SECTIONS = {
    "model": ["embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "audio_cfg"],
    "vision": [
        "image_size",
        "layers",
        "width",
        "head_width",
        "mlp_ratio",
        "patch_size",
        "pool_type",
        "timm_model_name",
    ],
    "text": [
        *("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "pool_type", "eos_id"),
        *("tokenizer_kwargs", "hf_tokenizer_name", "act_kwargs", "norm_kwargs", "no_causal_mask"),
    ],
    "preprocess": ["mean", "std", "mode", "interpolation", "resize_mode"],
}


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_settings_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """For any values: the error names a key of the file, or the result is valid."""
    section = data.draw(st.sampled_from(sorted(SECTIONS)))
    changes = data.draw(st.dictionaries(st.sampled_from(SECTIONS[section]), JSON, min_size=1, max_size=2))
    stated: dict[str, Any] = {section: changes}
    try:
        contract = read_towers(open_clip(tmp_path, **stated))
    except ModelFileError as error:
        assert error.file in (CONFIG, "tokenizer.json", "tokenizer_config.json")
    else:
        assert contract.image.hidden % contract.image.heads == contract.text.hidden % contract.text.heads == 0
        assert min(contract.image.intermediate, contract.text.intermediate, contract.image.patches) >= 1
        assert min(contract.image_spec.std) > 0


@pytest.mark.parametrize(
    "stated", [[], 5, "x", {"model_cfg": []}, {"model_cfg": {"vision_cfg": [], "text_cfg": {}}}, {}]
)
def test_no_settings_are_refused(tmp_path: Path, stated: object) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(stated), encoding="utf-8")
    assert refused(tmp_path).startswith(CONFIG)
