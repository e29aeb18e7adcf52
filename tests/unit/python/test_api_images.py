"""Pictures in the Python API, over the scripted model that takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

import shoal
from shoal import Image, Match
from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.errors import EmptyInput, InputRejected, InvalidValue, ModelNotFound, Unsupported, WrongType
from shoal.python.images import picture_of
from shoal.types import Array, Item
from tests.unit.drawn import file_of

PICTURES = "fake:images=1"
RED = file_of("red")


def units(*items: Item) -> Array:
    rows = np.stack([compute_vector(tokenize_item(item), 32) for item in items])
    found: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def scores(picture: Image, texts: list[str]) -> tuple[Array, Array]:
    """The cosines, and a softmax over ten times of them."""
    cosines = (units(*texts) @ units(picture).T)[:, 0]
    powers = np.exp(10 * cosines)
    return cosines, powers / powers.sum()


class TestEmbed:
    def test_texts_and_pictures_keep_their_order(self, tmp_path: Path) -> None:
        """In every form of a picture."""
        path = tmp_path / "blue.png"
        path.write_bytes(file_of("blue"))
        drawn = pillow.open(path)
        written = picture_of(drawn)
        assert isinstance(written, Image)
        with shoal.open(PICTURES) as s:
            found = s.embed(["a b", path, RED, tokenize_item("c"), Image(RED), drawn])
            right = units("a b", Image(path.read_bytes()), Image(RED), "c", Image(RED), written)
            assert np.allclose(found, right)
            assert np.allclose(asyncio.run(s.aembed([path, "a"])), right[[1]].tolist() + units("a").tolist())

    def test_tokens_are_the_texts(self) -> None:
        """More than one part; pictures have none."""
        with shoal.open(PICTURES) as s:
            found = s.embed([RED, "a b"] * 400, outputs=["dense"])
            assert np.allclose(found.vectors, np.tile(units(Image(RED), "a b"), (400, 1)))
            assert found.tokens[1::2] == [2] * 400

    def test_a_model_of_texts(self) -> None:
        with shoal.open("fake:") as s, pytest.raises(InvalidValue, match="accepts only text"):
            s.embed([RED])

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with shoal.open(PICTURES) as s, pytest.raises(InvalidValue, match=r"no\.png cannot be read: No such file"):
            s.embed(["a", tmp_path / "no.png"])


class TestClassify:
    def test_pictures_have_labels(self) -> None:
        with shoal.open("fake:labels=3:images=1") as s:
            one, two = s.classify([RED, "a"])
            assert {each.label for each in one} == {"LABEL_0", "LABEL_1", "LABEL_2"}
            assert one != two
            assert s.classify([Image(RED)]) == [one]


class TestRank:
    def test_the_best_comes_first(self) -> None:
        texts = ["a", "b c", "d", "e"]
        with shoal.open(PICTURES) as s:
            found = s.rank(RED, texts)
            cosines, probabilities = scores(Image(RED), texts)
            assert [each.index for each in found] == np.argsort(-probabilities).tolist()
            assert [each.text for each in found] == [texts[each.index] for each in found]
            assert np.allclose([each.score for each in found], probabilities[[each.index for each in found]], atol=1e-5)
            assert np.allclose([each.cosine for each in found], cosines[[each.index for each in found]], atol=1e-5)
            assert isinstance(found[0], Match)

    def test_one_softmax_over_a_list_of_any_length(self, tmp_path: Path) -> None:
        """Also where it is cut up; asynchronously, from a file."""
        path = tmp_path / "red.png"
        path.write_bytes(RED)
        texts = [f"t{number}" for number in range(1100)]
        with shoal.open(PICTURES) as s:
            found = asyncio.run(s.arank(path, texts, model="fake"))
        _, probabilities = scores(Image(RED), texts)
        assert [each.text for each in found[:3]] == [texts[place] for place in np.argsort(-probabilities)[:3]]
        assert sum(each.score for each in found) == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize(
        ("model", "image", "texts", "error", "words"),
        [
            (PICTURES, "red.png", ["a"], WrongType, "image must be .* a Path .*, not str"),
            (PICTURES, RED, "a", WrongType, "texts must be a list"),
            (PICTURES, RED, [b"a"], WrongType, r"texts\[0\] must be a string, not bytes"),
            (PICTURES, RED, [], EmptyInput, "at least one of each"),
            ("fake:", RED, ["a"], InvalidValue, "accepts only text"),
            ("fake:labels=2:images=1", RED, ["a"], ModelNotFound, "can embed"),
        ],
    )
    def test_what_cannot_be_compared(self, model: str, image: Any, texts: Any, error: type, words: str) -> None:
        with shoal.open(model) as s, pytest.raises(error, match=words):
            s.rank(image, texts)

    def test_a_model_that_only_labels_pictures(self) -> None:
        with shoal.open("fake:labels=2:images=1") as s, pytest.raises(Unsupported, match="name a CLIP or SigLIP"):
            s.rank(RED, ["a"], model="fake")

    def test_the_model_s_name_is_a_text(self) -> None:
        with shoal.open(PICTURES) as s, pytest.raises(WrongType, match="model must be str"):
            s.rank(RED, ["a"], model=None)  # type: ignore[arg-type]

    def test_an_error_names_the_text(self) -> None:
        with shoal.open(PICTURES) as s, pytest.raises(InputRejected, match=r"^text 600: "):
            s.rank(RED, ["a"] * 600 + ["reject-item"])
