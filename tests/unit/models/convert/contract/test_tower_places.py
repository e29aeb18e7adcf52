"""File locations of dual encoders, and a tokenizer built from CLIP's vocabulary and merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_tokenizer import write_tower_tokenizer
from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import has_towers, read_towers
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify_dual_encoder import verify_images, verify_texts
from tests.unit.models.checkpoints import checkpoint, write_json
from tests.unit.models.engines import RUNS
from tests.unit.models.open_clip_checkpoints import open_clip
from tests.unit.models.tower_checkpoints import CONTEXT, SIZE, towers

OLD = "sentence_transformers.models.CLIPModel"
NEW = "sentence_transformers.base.modules.transformer.Transformer"
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
ENDS = ["<|startoftext|>", "<|endoftext|>"]
VOCABULARY = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "!</w>", "'s</w>", "fi", "fis", "h</w>x", *ENDS]


def modules(folder: Path, *entries: tuple[str, str]) -> None:
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(entries)]
    write_json(folder / "modules.json", listed)


def vocabulary(folder: Path, *, words: list[str] = VOCABULARY, settings: dict[str, Any] | None = None) -> Path:
    """Replace tokenizer.json with CLIP's two files."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    write_json(folder / "vocab.json", {word: place for place, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\nf i\nfi s\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", settings or {})
    return folder


def sized(folder: Path) -> Path:
    """A model for that vocabulary."""
    return vocabulary(towers(folder, text={"vocab_size": len(VOCABULARY), "eos_token_id": len(VOCABULARY) - 1}))


class TestSentenceTransformers:
    @pytest.mark.parametrize(("kind", "path"), [(OLD, "0_CLIPModel"), (OLD, ""), (NEW, ""), (NEW, "0_Transformer/")])
    def test_the_folder_of_the_one_module_is_read(self, tmp_path: Path, kind: str, path: str) -> None:
        inner = tmp_path / path
        towers(inner)
        modules(tmp_path, (kind, path))
        assert has_towers(tmp_path)
        contract = read_towers(tmp_path)
        assert contract.path == path.strip("/")
        assert read_contrast(tmp_path, contract).scale == pytest.approx(100.0)
        build_text_tower(tmp_path, contract, tmp_path / "text.onnx")
        build_image_tower(tmp_path, contract, tmp_path / "image.onnx")
        target = tmp_path / "target"
        target.mkdir()
        write_tower_tokenizer(tmp_path, target / "tokenizer.json", family=contract.family, path=contract.path)
        run = RUNS["onnxruntime"](tmp_path / "image.onnx")
        assert verify_texts(tmp_path, contract, target, RUNS["onnxruntime"](tmp_path / "text.onnx")).passed
        assert verify_images(tmp_path, contract, run).passed
        pixels = np.ones((1, 3, SIZE, SIZE), np.float32)
        build_image_tower(inner, read_towers(towers(tmp_path / "alone")), tmp_path / "alone.onnx")
        expected = RUNS["onnxruntime"](tmp_path / "alone.onnx")({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS]
        assert np.array_equal(run({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS], expected)

    def test_open_clips_layout_inside(self, tmp_path: Path) -> None:
        (tmp_path / "0_CLIPModel").mkdir()
        open_clip(tmp_path / "0_CLIPModel")
        modules(tmp_path, (OLD, "0_CLIPModel"))
        contract = read_towers(tmp_path)
        assert (contract.layout, contract.path) == ("open_clip", "0_CLIPModel")
        assert read_contrast(tmp_path, contract).scale == pytest.approx(100.0)

    @pytest.mark.parametrize(
        ("missing", "words"),
        [
            ("config.json", "0_CLIPModel/config.json: is missing"),
            ("preprocessor_config.json", "0_CLIPModel/preprocessor_config.json: is missing"),
            ("tokenizer.json", "0_CLIPModel/tokenizer.json: is missing"),
        ],
    )
    def test_missing_files_are_named_with_their_folder(self, tmp_path: Path, missing: str, words: str) -> None:
        towers(tmp_path / "0_CLIPModel")
        modules(tmp_path, (OLD, "0_CLIPModel"))
        (tmp_path / "0_CLIPModel" / missing).unlink()
        assert has_towers(tmp_path)
        with pytest.raises(ModelFileError, match=f"^{words}"):
            read_towers(tmp_path)

    def test_modules_after_the_towers_are_refused(self, tmp_path: Path) -> None:
        towers(tmp_path / "0_CLIPModel")
        modules(tmp_path, (OLD, "0_CLIPModel"), ("sentence_transformers.models.Dense", "1_Dense"))
        assert has_towers(tmp_path)
        with pytest.raises(
            ModelFileError, match=r"^modules\.json: \[1\]\.type: a sentence_transformers\.models\.Dense"
        ):
            read_towers(tmp_path)

    def test_a_path_out_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        modules(tmp_path, (OLD, "../elsewhere"))
        with pytest.raises(ModelFileError, match=r"^modules\.json: \[0\]\.path: '\.\./elsewhere' is outside"):
            has_towers(tmp_path)

    @pytest.mark.parametrize("listed", [[], {}, [{"type": 5, "path": ""}], [{"type": "CLIPModel"}], ["x"]])
    def test_invalid_module_lists_are_left_to_another_reader(self, tmp_path: Path, listed: object) -> None:
        (tmp_path / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
        assert not has_towers(tmp_path)
        assert has_towers(towers(tmp_path))

    def test_text_models_and_others_code_are_none(self, tmp_path: Path) -> None:
        checkpoint(tmp_path / "text")
        modules(tmp_path / "text", ("sentence_transformers.models.Transformer", ""))
        assert not has_towers(tmp_path / "text")
        modules(tmp_path, ("theirs.CLIPModel", ""))
        assert not has_towers(tmp_path)


class TestVocabularyAndMerges:
    def test_a_tokenizer_is_made_of_them(self, tmp_path: Path) -> None:
        contract = read_towers(sized(tmp_path))
        assert contract.text_spec.max_tokens == CONTEXT
        write_tower_tokenizer(tmp_path, tmp_path / "made.json", family="clip")
        tiny_tokenizer = Tokenizer.from_file(str(tmp_path / "made.json"))
        got = tiny_tokenizer.encode("  Fish\n\tFIX's <|endoftext|> cat!")
        assert got.tokens == [
            ENDS[0], "fis", "h</w>", "fi", "x</w>", ENDS[1], "s</w>", ENDS[1], "c", "a", "t</w>", "!</w>", ENDS[1],
        ]  # fmt: skip

    def test_an_existing_tokenizer_is_used_unchanged(self, tmp_path: Path) -> None:
        folder = towers(tmp_path)
        stored = (folder / "tokenizer.json").read_bytes()
        vocabulary(folder)
        (folder / "tokenizer.json").write_bytes(stored)
        write_tower_tokenizer(folder, tmp_path / "made.json", family="clip")
        assert (tmp_path / "made.json").read_bytes() == stored

    @pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
    def test_both_are_needed(self, tmp_path: Path, missing: str) -> None:
        (sized(tmp_path) / missing).unlink()
        with pytest.raises(ModelFileError, match=r"^tokenizer\.json: is missing, and so is vocab\.json or merges\.txt"):
            read_towers(tmp_path)

    def test_siglips_are_not_made_so(self, tmp_path: Path) -> None:
        vocabulary(towers(tmp_path, "siglip"))
        with pytest.raises(ModelFileError, match=r"^tokenizer\.json: is missing, and a sentencepiece model"):
            read_towers(tmp_path)

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("vocab.json", "{", "and merges.txt are not a valid vocabulary"),
            ("merges.txt", "#version: 0.2\nq q q\n", "and merges.txt are not a valid vocabulary"),
            ("merges.txt", "#version: 0.2\nq qq\n", "and merges.txt are not a valid vocabulary"),
            ("vocab.json", '{"a": 0, "f": 1, "i": 2, "fi": 3, "s": 4, "fis": 5}', "does not hold the tokens"),
        ],
    )
    def test_broken_ones_are_refused(self, tmp_path: Path, name: str, text: str, words: str) -> None:
        (sized(tmp_path) / name).write_text(text, encoding="utf-8")
        with pytest.raises(ModelFileError, match=rf"^vocab\.json: {words}"):
            read_towers(tmp_path)

    def test_ends_of_other_names(self, tmp_path: Path) -> None:
        words = [*VOCABULARY[:-2], "<s>", "</s>"]
        stated = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "</s>"}
        folder = vocabulary(
            towers(tmp_path, text={"vocab_size": len(words), "eos_token_id": len(words) - 1}),
            words=words,
            settings=stated,
        )
        read_towers(folder)
        write_tower_tokenizer(folder, tmp_path / "made.json", family="clip")
        assert Tokenizer.from_file(str(tmp_path / "made.json")).encode("a").tokens == ["<s>", "a</w>", "</s>"]


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = vocabulary(tmp_path_factory.mktemp("made"))
    write_tower_tokenizer(folder, folder / "made.json", family="clip")
    return Tokenizer.from_file(str(folder / "made.json"))


@given(st.text(max_size=40))
def test_every_text_has_its_ends_and_blanks_around_it_mean_nothing(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (len(VOCABULARY) - 2, len(VOCABULARY) - 1)
    assert tiny_tokenizer.encode(f"  {text}\n").ids == ids
    assert tiny_tokenizer.encode(text.replace(" ", "\t \n")).ids == ids
